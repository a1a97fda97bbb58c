"""What is kept of a recorded run, how it comes about, and how it is read.

Invariant: record.json is written last: a folder without it holds no record.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._arrays import largest, packed, unpacked
from hypergrad._problem import Problem
from hypergrad._record_prints import prints_of
from hypergrad._record_states import file_of, stops
from hypergrad._safe_files import Damaged, Missing, digest, read, sealed, write_new
from hypergrad._set_up import About, set_up
from hypergrad._settings import own_settings
from hypergrad._train import Trained, train
from hypergrad.adjoints import Disk, Reversible
from hypergrad.adjoints.capacity import capacities
from hypergrad.adjoints.stored import store_segments
from hypergrad.batches import HostBatches
from hypergrad.errors import RangeError, StorageError
from hypergrad.optimizers.expand import concrete
from hypergrad.optimizers.past import Past
from hypergrad.run.disk import DiskWords, writing_to
from hypergrad.run.fingerprints import state_prints
from hypergrad.run.forward import forward, steps_within
from hypergrad.run.plan import Plan, Span, marks, schedules
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Capacity, Noted, Outcome, assess, note, nothing_kept
from hypergrad.run.step import State, final_values, initial_state


NAME, END, CLAIM = "record.json", "end.npz", "recording"
FORMAT = 8  # of `prints` and of words, too
CURE = "To record again, empty the folder or name another."
_IN_USE = (
    "`folder` {} holds files and no finished record: training was interrupted, another process records there, or it is used "
    "for something else. Empty it, or name another."
)


class Made(NamedTuple):
    """What a record is of, as it was given."""

    loss: Any
    batches: Any
    steps: int | None
    given: dict[str, Any]
    microbatches: Any = None
    past: Past | None = None

    def set_up(self, adjoint: Any) -> tuple[Run, Inputs, About]:
        if isinstance(self.batches, HostBatches):
            raise ValueError("a record needs `batches` that are a function of t, such as hg.stacked; got hg.host_batches.")
        others = {"steps": self.steps, "microbatches": self.microbatches, "past": self.past}
        return set_up(Problem(loss=self.loss, batches=self.batches, **others, **self.given), adjoint)

    def train(self, given: dict[str, Any], adjoint: Any) -> Trained:
        g, others = {**self.given, **given}, {"theta", "state", "statistics"}
        options = {name: g[name] for name in others} | {"microbatches": self.microbatches}
        return train(self.loss, g["params"], g["optimizer"], self.batches, steps=self.steps, adjoint=adjoint, **options)


def apart(tree: Any) -> Any:
    """Each number an array of its own: leaves that have the same one would lie side by side, or share a schedule, and not
    where each is differentiated for itself."""
    return jax.tree.map(lambda x: jnp.array(x) if is_float(x) and jnp.ndim(x) < 2 else x, tree)


def is_float(x: Any) -> bool:
    return isinstance(x, float) or eqx.is_inexact_array(x)


class End(NamedTuple):
    """What end.npz holds."""

    state: State
    losses: Array
    batches: Array | None
    noted: Noted
    starts: Any  # prints of the state before each segment: uint64 [segments, places]


def train_and_keep(made: Made, folder: pathlib.Path, states_budget: int | str | None = None) -> None:
    _check_empty(folder)
    run, inputs, _ = run_of(made, folder)
    prints = prints_of(run, inputs)
    with _claimed(folder):
        if recorded(folder):  # by another process, since
            return
        _check_empty(folder)
        try:
            _keep(run, inputs, prints, folder, states_budget)
        except BaseException:
            _remove(folder)
            raise


def recorded(folder: pathlib.Path) -> bool:
    """Whether there is a record."""
    with writing_to(folder):
        return (folder / NAME).exists()


def _check_empty(folder: pathlib.Path) -> None:
    with writing_to(folder):
        if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
            raise StorageError(f"{folder} cannot be written to: it is a file, or a link to nothing. Name a folder.")
        if folder.exists() and any(path.name != CLAIM for path in folder.iterdir()):
            raise ValueError(_IN_USE.format(folder))


@contextlib.contextmanager
def _claimed(folder: pathlib.Path) -> Iterator[None]:
    """By a file that is there meanwhile this call has the folder alone; who comes second is told, and touches nothing."""
    claim = folder / CLAIM
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_new(claim, b"")
        except FileExistsError as error:
            raise ValueError(_IN_USE.format(folder)) from error
    try:
        yield
    finally:
        claim.unlink(missing_ok=True)


def _remove(folder: pathlib.Path) -> None:
    """What recording may have written into a folder that was empty when it was claimed, beside its words."""
    with contextlib.suppress(OSError):
        for path in (*folder.glob(file_of("*")), folder / END, folder / NAME, folder / CLAIM):
            path.unlink(missing_ok=True)
        folder.rmdir()


def _keep(run: Run, inputs: Inputs, prints: dict[str, str], folder: pathlib.Path, states_budget: int | str | None) -> None:
    starts: list[Array] = []
    states: dict[str, str] = {}
    with own_settings():
        plan, state, capacity = begin(run, inputs)
        kept = stops(run, state, states_budget)

        def look(step: int, state: State) -> None:
            starts.append(run.segment(state_prints, state))
            if step in kept:
                states[str(step)] = write_arrays(folder / file_of(step), {"state": state})

        words, end, seen, noted = store_segments(run, capacity, inputs, state, plan, look)
    assert isinstance(words, DiskWords)
    try:
        with own_settings():
            check_ok(outcome_of(run, inputs, plan, end, seen.losses, noted))
        seen_of_starts = np.stack(jax.device_get(starts))  # a program would have an operand for each
        print_ = write_arrays(folder / END, {"end": End(end, seen.losses, seen.batches, noted, seen_of_starts)})
        about = {"format": FORMAT, "words": words.folder.name, "end": print_, "states": states}
        write_file(folder / NAME, sealed(about | {"prints": prints}))
    except BaseException:
        words.drop()
        raise


def run_of(made: Made, folder: pathlib.Path) -> tuple[Run, Inputs, About]:
    run, inputs, about = made.set_up(Reversible(driver="scan", buffer=Disk(str(folder), keep=True)))
    check_concrete("hg.record", inputs)
    return run, inputs, about


def check_concrete(name: str, values: Any = (), cure: str = "") -> None:
    """That nobody traces the caller: what it works on are files."""
    if not concrete((values, jnp.zeros(()))):  # inside of jax.jit, what it makes is traced, whatever it is made of
        raise ValueError(
            f"{name} works from Python and on files: call it outside of jax.jit, jax.vmap and jax.grad, with values that "
            f"are known.{cure}"
        )


def check_ok(outcome: Outcome) -> None:
    if not outcome.status.ok:
        error = outcome.status.error()
        if isinstance(error, RangeError):
            error.add_note("hg.record has the fraction bits that hg.Reversible has by default, and takes no others.")
        raise error


def begin(run: Run, inputs: Inputs) -> tuple[Plan, State, Capacity]:
    return *run.outside_loop(_begin, inputs.values, inputs.h), capacities(run, inputs.h, None)


def _begin(run: Run, values: Any, h: Any) -> tuple[Plan, State]:
    return schedules(run, h), initial_state(run, values, nothing_kept(run))


def outcome_of(run: Run, inputs: Inputs, plan: Plan, end: State, losses: Array, noted: Noted) -> Outcome:
    return run.segment(_outcome, inputs.values, inputs.h, plan, end, losses, noted)


def _outcome(run: Run, values: Any, h: Any, plan: Plan, end: State, losses: Array, noted: Noted) -> Outcome:
    return Outcome(final_values(run, end), losses, assess(run, values, h, plan, end, noted, nothing_kept(run)))


def like_end(run: Run, inputs: Inputs, plan: Plan, first: State) -> End:
    """Of what is in end.npz, the shapes and types."""
    inner = dataclasses.replace(run, store=None)

    def made(inputs: Inputs, plan: Plan, state: State) -> End:
        end, seen, sizes = forward(inner, inputs, state, steps_within(inner, inputs, marks(plan, 0), Span(0, run.steps)))
        print_ = state_prints(inner, state)
        starts = jnp.broadcast_to(print_, (len(run.emptied), *print_.shape))
        return End(end, seen.losses, seen.batches, note(inner, seen.losses, sizes, jnp.int32(0)), starts)

    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(made, inputs, plan, first))


def write_arrays(path: pathlib.Path, trees: dict[str, Any]) -> str:
    """Returns their checksum."""
    content = packed(trees)
    write_file(path, content)
    return digest(content)


def read_arrays(path: pathlib.Path, print_: Any, like: dict[str, Any]) -> Any:
    """The inverse of `write_arrays`, for trees such as `like`."""

    def parse(content: bytes) -> Any:
        if digest(content) != print_:
            raise Damaged("is damaged or was edited: it does not match the checksum in record.json")
        return unpacked(content, like)

    return opened(path, largest(like), parse)


def write_file(path: pathlib.Path, content: bytes) -> None:
    with writing_to(path.parent):
        write_new(path, content)


def opened(path: pathlib.Path, limit: int, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(read(path, limit))
    except Missing as error:
        raise StorageError(f"{path} is missing: {path.parent} holds no whole record. {CURE}") from error
    except Damaged as error:
        raise StorageError(f"{path} {error}: nothing can be made of it. {CURE}") from error
