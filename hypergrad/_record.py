"""`record`: a training run that can be gone back on, to any step, from any process.

Invariant: a state that a record gives has the bits that training had there: at each segment that it goes back over, states
are compared with prints that were taken on the way out.

    record.json    what ran, by prints of its arrays, its program and its machine; the last file to be written
    end.npz        the last state, losses, prints of the states between segments
    state-N.npz    the state after N steps, of those that are kept
    words-.../     the lost digits, as hypergrad/run/disk.py has them
"""

import collections
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._integers import as_int
from hypergrad._meshes import in_automatic_axes
from hypergrad._record_files import (
    CURE,
    END,
    FORMAT,
    NAME,
    End,
    Made,
    apart,
    begin,
    check_concrete,
    check_ok,
    is_float,
    like_end,
    opened,
    outcome_of,
    read_arrays,
    recorded,
    run_of,
    train_and_keep,
)
from hypergrad._record_prints import compare, print_of_batches, prints_of, reject_changes
from hypergrad._record_resume import gone_on
from hypergrad._record_states import file_of
from hypergrad._report import warn
from hypergrad._safe_files import unsealed
from hypergrad._scalar import real_scalar
from hypergrad._settings import own_settings
from hypergrad._train import Trained, put_together
from hypergrad.adjoints import Reversible
from hypergrad.adjoints.budget import bytes_of
from hypergrad.adjoints.passes import Ends
from hypergrad.adjoints.recorded import Recorded
from hypergrad.adjoints.reversible import Kept
from hypergrad.adjoints.stored import buffers_of, spans
from hypergrad.errors import ReversalError, StorageError
from hypergrad.optimizers.past import Past
from hypergrad.run.disk import DiskWords
from hypergrad.run.fingerprints import state_prints
from hypergrad.run.plan import marks
from hypergrad.run.rewind import rewound
from hypergrad.run.status import Outcome
from hypergrad.run.step import State, final_values, refilled, without_words


LIMIT = 2**20  # bytes of record.json

_GO_ON = (
    " To differentiate what comes after a step, go on by hg.train(..., state=record.rewind(step).state): steps are counted "
    "anew there, for batches, keys and what is done every k steps, and averages begin anew."
)


@in_automatic_axes
def record(
    loss: Callable[[Any, Any, Any], Any],
    params: Any,
    optimizer: Any,
    batches: Callable[[Array], Any],
    *,
    folder: str | os.PathLike[str],
    theta: Any = None,
    steps: int | None = None,
    state: dict[str, Any] | None = None,
    statistics: Any = None,
    microbatches: Any = None,
    states_budget: int | str | None = None,
) -> "Record":
    """Train as `hg.train` does, and keep in `folder` what it takes to go back to any step: the end, and the lost digits.

    The arguments of `hg.train`, concrete. That is log2(1/decay) bits a parameter and step, 0.152 for a momentum of 0.9. A
    folder that holds a record of the same run is opened, and nothing is trained: also in another process, and with
    `microbatches` on another number of devices. states_budget: bytes, or a string such as "2GiB", for states between the
    start and the end, of a record that is made: with k of them the way back to a step is about a (k + 1)-th of the run at
    most. None: the end alone.

    Raises what `hg.train` raises; ValueError for a folder with the record of another run, by what differs, and for Python
    that the programs call (`jax.pure_callback`, but for `equinox.error_if`), which cannot be compared; `hg.StorageError`
    for files that cannot be written or were changed. Another version of JAX or another processor is a warning: it may round
    otherwise, and then going back ends in `hg.ReversalError`.
    """
    given = {"params": params, "theta": theta, **apart({"optimizer": optimizer, "state": state, "statistics": statistics})}
    given = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, given)  # the caller's may change
    made = Made(loss, batches, steps, given, microbatches)
    path = pathlib.Path(folder).absolute()  # wherever the process goes
    if states_budget is not None:
        bytes_of(states_budget, "states_budget")
    if not recorded(path):
        train_and_keep(made, path, states_budget)
    return Record(made, path)


class Record:
    """A training run that was recorded."""

    def __init__(self, made: Made, folder: pathlib.Path) -> None:
        self._made, self.folder = made, folder
        self._run, self._inputs, self._about = run_of(made, folder)
        run, inputs = self._run, self._inputs
        about = opened(folder / NAME, LIMIT, unsealed)
        self._prints = here = prints_of(run, inputs)
        self._of_batches = print_of_batches(made.batches)
        there, name = about.get("prints"), about.get("words")
        known = about.get("format") == FORMAT and isinstance(there, dict) and there.keys() == here.keys()
        if not known or not re.fullmatch("words-[0-9a-f]+", str(name)):
            raise StorageError(f"{folder / NAME} is no record of this version of hypergrad. {CURE}")
        compare(folder, there, here)
        with own_settings():
            self._plan, first, _ = begin(run, inputs)
            like = {"end": like_end(run, inputs, self._plan, first)}
            self._end: End = read_arrays(folder / END, about.get("end"), like)["end"]
            self._first, self._kept = first, {int(step): print_ for step, print_ in about["states"].items()}
            self._words = DiskWords.of_before(folder / str(name), buffers_of(run, first))
            end = self._end
            self._outcome = outcome_of(run, inputs, self._plan, end.state, end.losses, end.noted)
        warn(self._outcome.status)
        self._trained = put_together(run, self._about, self._outcome, run.steps, made.given["state"], jnp.bool_(True))

    @property
    @in_automatic_axes
    def trained(self) -> Trained:
        """What training came to."""
        return self._trained

    @in_automatic_axes
    def rewind(self, step: int) -> Trained:
        """What training had come to after `step` steps, bit for bit; 0: the start, on the grid. In the time of the steps
        from there to the next state that is kept. `status` is that of the whole run."""
        step = self._known(step)
        return self._at(step, self._state(step))

    def steps(self, first: int, last: int) -> Iterator[tuple[int, Trained]]:
        """(step, `rewind(step)`) for step = last, last - 1, ..., first: backwards, in one go."""
        first, last = self._known(first), self._known(last)
        if first > last:
            raise ValueError(f"`first` of steps must not be above `last`; got {first} and {last}. They come backwards.")
        wanted = range(last, first - 1, -1)
        states = self._states(wanted)

        @in_automatic_axes
        def steps() -> tuple[int, Trained]:
            step, state = next(states)
            return step, self._at(step, state)

        return (steps() for _ in wanted)

    @in_automatic_axes
    def hypergradient(self, function: Callable[[Trained], Array]) -> dict[str, Any]:
        """The derivative of function(trained), a float scalar, in all that is float of {"params", "optimizer", "theta",
        "state", "statistics"}, without training again; may be asked again with another function. Raises ValueError where the
        loss or the batches have changed since the record was opened."""
        ends = Ends(self._end.state, None, None, self._words, self._plan)
        check_concrete("Record.hypergradient")
        self._check_unchanged()
        adjoint = Recorded(Kept(self._outcome, ends, self._end.batches))
        floats, others = eqx.partition(self._made.given, is_float)
        floats = jax.tree.map(jnp.asarray, floats)
        run = lambda floats: self._made.train(eqx.combine(floats, others), adjoint)  # noqa: E731
        return jax.grad(lambda floats: real_scalar("function", function, run(floats)))(floats)

    @in_automatic_axes
    def resume(self, step: int, *, loss: Any = None, batches: Any = None, steps: int | None = None, **given: Any) -> Trained:
        """Train on from `step`, bit for bit as if from the start, with another loss, batches, optimizer or theta from there.

        steps: in all; None: as before. What came before `step` is taken as it was: losses, and hyperparameters that held
        there (weights of averages that are made of them, as Schedule-Free's, to rounding). Raises ValueError where the
        decays of the steps before are others (states are in their units), and where what was recorded has changed since the
        record was opened: loss and batches, or with another `loss` the batches, if they are not given either.
        """
        if unknown := sorted(set(given) - {"optimizer", "theta"}):
            raise TypeError(f"`resume` takes loss, batches, steps, optimizer and theta; got {', '.join(unknown)}.")
        step, before = self._known(step), self._made
        if (total := as_int(steps)) is not None and total < step:
            raise ValueError(f"`steps` of resume are in all: at least the {step} that are behind it; got {total}.")
        made = before._replace(
            loss=before.loss if loss is None else loss,
            batches=before.batches if batches is None else batches,
            steps=self._run.steps if steps is None else steps,
            given={**before.given, **given},
            past=Past(before.given["optimizer"], self._run.steps, step),
        )
        run, inputs, about = made.set_up(Reversible(driver="scan"))
        check_concrete("Record.resume", inputs, _GO_ON)
        if loss is None:
            self._check_unchanged()
        elif batches is None:  # nobody asks for the loss that was recorded
            reject_changes(self.folder, self._of_batches, print_of_batches(before.batches), run.x64 == self._run.x64)
        state = self._state(step)
        with own_settings():
            outcome = gone_on(run, inputs, (self._run, self._inputs), self._end, state, step)
        check_ok(outcome)
        warn(outcome.status)
        return put_together(run, about, outcome, run.steps, made.given["state"], jnp.bool_(True))

    def _check_unchanged(self) -> None:
        """That what was recorded computes the same still: it is traced anew, with what it reads from outside."""
        run, inputs, _ = run_of(self._made, self.folder)
        reject_changes(self.folder, self._prints, prints_of(run, inputs), run.x64 == self._run.x64)

    def _at(self, step: int, state: State) -> Trained:
        with own_settings():
            values = self._run.outside_loop(final_values, state)
        outcome = Outcome(values, self._end.losses[:step], self._outcome.status)
        return put_together(self._run, self._about, outcome, step, self._made.given["state"], jnp.bool_(True))

    def _known(self, step: Any) -> int:
        check_concrete("hg.Record")
        found = as_int(step)
        if found is None or not 0 <= found <= self._run.steps:
            raise ValueError(f"`step` must be an integer from 0 to {self._run.steps}; got {step!r}.")
        return found

    def _state(self, step: int) -> State:
        ((_, state),) = self._states([step])
        return state

    def _states(self, wanted: Sequence[int]) -> Iterator[tuple[int, State]]:
        """(step, the state after so many steps, without words) of steps in falling order.

        Each segment is undone whole, and judged, before anything of it is given.
        """
        run, at, state, missing = self._run, self._run.steps, self._end.state, collections.deque(wanted)
        if missing and missing[0] == at:
            yield missing.popleft(), state
        for k, (first, length) in reversed(list(enumerate(zip(*spans(run), strict=True)))):
            last = first + length
            if not missing:
                return
            if self._nearest(missing[0]) < last:
                continue
            if at != last:
                at, state = last, self._kept_state(last, k + 1)
            if missing[0] == last:
                yield missing.popleft(), state
                if not missing or self._nearest(missing[0]) < last:
                    continue
            with own_settings():
                state = refilled(run, state, self._words.take(first))
                start = self._back(state, k, last, first)
                if not (run.segment(state_prints, start) == self._end.starts[k]).all():
                    raise self._error(first)
            while missing and missing[0] >= first:
                step = missing.popleft()
                with own_settings():
                    state, last = self._back(state, k, last, step), step
                yield step, without_words(run, state)
            at, state = first, without_words(run, start)

    def _nearest(self, step: int) -> int:
        """The step of the first state from there on that needs no way back."""
        return min((kept for kept in self._kept if kept >= step), default=self._run.steps)

    def _kept_state(self, step: int, segment: int) -> State:
        with own_settings():
            state: State = read_arrays(self.folder / file_of(step), self._kept[step], {"state": self._first})["state"]
            if not (self._run.segment(state_prints, state) == self._end.starts[segment]).all():
                raise self._error(step)
        return state

    def _back(self, state: State, segment: int, last: int, step: int) -> State:
        first, length = (own[segment] for own in spans(self._run))
        arguments = self._inputs, marks(self._plan, segment), self._end.losses, state
        numbers = (jnp.int32(x) for x in (first, last, last - step))
        state, same = self._run.segment(rewound, *arguments, *numbers, static=(length,))
        if not same:
            raise self._error(first)
        return state

    def _error(self, first: int) -> ReversalError:
        return ReversalError(
            f"the record in {self.folder} does not lead back to step {first}: what is computed there now has other bits "
            "than when it was recorded. Another version of JAX, other flags of XLA or another processor may round so: open "
            "it where it was made. If that is here, `loss` or `batches` are no functions of their arguments."
        )
