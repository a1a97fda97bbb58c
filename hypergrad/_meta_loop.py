"""The meta-loop: evaluate, update, remember; and go on from what a folder remembers.

Invariant: the history of a run that was killed and resumed is that of a run that was not, but for the seconds.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from hypergrad._average import norm
from hypergrad._callbacks import Callback, asked, begin, listed, say_what_is_left, say_who_stops, stopped_before
from hypergrad._checkpoint import Folder, folder_of
from hypergrad._descent import Descent, Point
from hypergrad._described import describe_arrays, describe_hypers
from hypergrad._evaluate import Evaluation, default_key, reject_traced
from hypergrad._history import MetaStep, best, recorded, restored
from hypergrad._hyper_names import hyper_path, named_leaves
from hypergrad._integers import as_int
from hypergrad._processes import in_all, whole
from hypergrad._run_record import Run, library_version
from hypergrad._safe_files import Damaged
from hypergrad._stability import Stability, worst_growth
from hypergrad.callbacks import StopOnGrowth
from hypergrad.hypers import check_hypers, describe, is_domain, split_fixed


@jax.jit  # one program; called eagerly, one for each operation
def _norms(grads: Any) -> tuple[Array, Any]:
    """Of all, and of each leaf."""
    return norm(grads), jax.tree.map(norm, grads)


class Result(NamedTuple):
    """What `optimize` returns."""

    hypers: Any  # after the last update, as stored (`hg.natural`: natural units); where growth stopped the loop, the best
    best: MetaStep  # the step of lowest `monitor`, or of lowest `value` without a monitor_fn
    history: list[MetaStep]


class MetaLoop:
    """A meta-loop that can run from any start; its runs share what is compiled."""

    def __init__(
        self,
        train_fn: Any,
        val_fn: Any,
        *,
        meta_steps: int = 50,
        meta_optimizer: Any = optax.adam(0.04),  # noqa: B008 (immutable)
        key: Array | None = None,
        seeds_per_step: int = 1,
        monitor_fn: Any = None,
        callbacks: Sequence[Callback] = (),
        jit: bool = True,
        skip_nonfinite: bool = False,
        aggregate: str | None = None,
        diagnose: bool = True,
        stop_on_growth: bool = True,
    ) -> None:
        meta_steps, seeds_per_step = _count("meta_steps", meta_steps), _count("seeds_per_step", seeds_per_step)
        self.callbacks = listed(callbacks)
        _check_arguments(meta_optimizer, aggregate, skip_nonfinite)
        self.evaluation = Evaluation(train_fn, val_fn, monitor_fn, seeds=seeds_per_step, jit=jit, watch=diagnose)
        self.descent = Descent(meta_optimizer, self.evaluation)
        self.aggregate = aggregate
        self.meta_steps, self.skip_nonfinite = meta_steps, bool(skip_nonfinite)
        guarded = any(isinstance(c, StopOnGrowth) for c in self.callbacks)
        self.guard = None if guarded or not stop_on_growth else StopOnGrowth()
        self.callbacks += [self.guard] if self.guard else []
        self.key = default_key(key)
        reject_traced("hg.optimize", self.key)
        self.identity = {
            "library version": library_version(),
            "key": str(jax.random.key_data(self.key) if jnp.issubdtype(self.key.dtype, jax.dtypes.prng_key) else self.key),
            "seeds_per_step": seeds_per_step,
            "skip_nonfinite": self.skip_nonfinite,
            "monitor_fn": "given" if monitor_fn else "none",
        }

    def run(self, hypers: Any, checkpoint: Any) -> Result:
        hypers = check_hypers(hypers)
        reject_traced("hg.optimize", hypers)
        learned, fixed = split_fixed(hypers)
        history: list[MetaStep] = []
        self.stability = Stability()
        point, stopped = self.descent.start(learned), False
        # What is searched along a line is the mean value, whose gradient is the mean.
        aggregate = self.aggregate or ("mean" if self.descent.one_key(point) else "clipped")
        self.evaluation.robust, self.identity["aggregate"] = aggregate == "clipped", aggregate
        with contextlib.nullcontext() if checkpoint is None else folder_of(checkpoint, self._about(hypers, point)) as folder:
            if folder is not None:
                point, history, stopped = self._resume(folder, point, fixed)
            begin(self.callbacks, None if folder is None else folder.path, history)
            if folder is not None and stopped:
                say_what_is_left(self.callbacks, folder.path, history, self.meta_steps, folder.run["stopped_at"])
            stopped = stopped or stopped_before(self.callbacks, history, self.meta_steps)
            undecided: set[int] = set()  # ids of callbacks that have returned None
            for _ in range(len(history), len(history) if stopped else self.meta_steps):
                done, point = self._meta_step(point, fixed, history)
                if folder is not None:
                    folder.check()  # what callbacks write is another's too, if the folder is
                history.append(done)
                stopping, wrong = self._asked(done, undecided, folder is not None)
                if folder is not None:
                    self._save(folder, history, point, bool(stopping))
                if wrong is not None:
                    raise wrong
                if stopping:
                    say_who_stops(stopping, undecided, history, self.meta_steps)
                    self._say_why(history)
                    break
        grown = any(isinstance(c, StopOnGrowth) and c.stopped for c in self.callbacks)
        return Result(best(history).hypers if grown else eqx.combine(point.learned, fixed), best(history), history)

    def _asked(self, done: MetaStep, undecided: set[int], kept: bool) -> tuple[list[Callback], TypeError | None]:
        """What callbacks say; of a run that is kept in a folder the same in all processes."""

        def seen(heard: tuple[list[Callback], TypeError | None]) -> str:
            wrong = "" if heard[1] is None else f": {heard[1]}"
            return f"{done.value!r} at meta-step {done.step}{', and stops' * bool(heard[0])}{wrong}"

        ask = lambda: asked(self.callbacks, done, undecided)  # noqa: E731
        return in_all(ask, seen, _OTHERWISE) if kept else ask()

    def _say_why(self, history: list[MetaStep]) -> None:
        """Of a stop that nobody asked for."""
        if self.guard is not None and self.guard.stopped:
            warnings.warn(
                f"hg.optimize stops at meta-step {history[-1].step}: the last {self.guard.patience} hypergradients, or the "
                f"growth behind them, were more than {self.guard.factor:g} times as large as they should be, and their "
                f"values no better. `hypers` of the result are those of its `best`, meta-step {best(history).step}. Go on "
                "from there with a lower meta-learning rate or more seeds_per_step; callbacks=[hg.callbacks.StopOnGrowth("
                "factor, patience)] waits longer, and stop_on_growth=False does not stop.",
                stacklevel=4,
            )

    def _save(self, folder: Folder, history: list[MetaStep], point: Point, stop: bool) -> None:
        records = recorded(history) | {"stopped_at": self.meta_steps if stop else 0}
        ledger = self.evaluation.ledger  # the same program after as before
        records |= {"capacity": ledger.capacity, "room": [[name, *lost] for name, lost in ledger.room]}
        hypers, *before = (split_fixed(done.hypers)[0] for done in history[:-3:-1])
        folder.save(hypers, before[0] if before else None, point, records)

    def _meta_step(self, point: Point, fixed: Any, history: list[MetaStep]) -> tuple[MetaStep, Point]:
        step, begin = len(history), time.perf_counter()
        key = self._key(point, step)
        evaluated, failure = self.evaluation(point.learned, fixed, key)
        if failure is not None and not self.skip_nonfinite:
            failure.add_note(f"(at meta-step {step} of hg.optimize)")
            raise failure
        if step == 0 and failure is None:
            warn_unused(evaluated.grads)
        status, (length, lengths) = self.evaluation.ledger.summary(), _norms(evaluated.grads)
        done = MetaStep(
            step, float(evaluated.value), float(length), 0.0, status, float(status.bits) if status else 0.0,
            eqx.combine(point.learned, fixed), float(evaluated.value_error), float(evaluated.gradient_error),
            int(np.sum(~evaluated.ok)), float(evaluated.monitor),
            {name: float(x) for name, x in named_leaves(lengths)},
            int(evaluated.clipped), worst_growth(self.evaluation.ledger),
        )  # fmt: skip
        self.stability.tell(done, self.evaluation.ledger, history)
        after = self.descent(point, fixed, evaluated, key) if evaluated.ok.any() else point
        return done._replace(seconds=time.perf_counter() - begin), after

    def _key(self, point: Point, step: int) -> Array:
        return jax.random.fold_in(self.key, 0 if self.descent.one_key(point) else step)

    def _about(self, hypers: Any, point: Point) -> Run:
        identity = self.identity | {"hypers": describe_hypers(hypers), "meta_optimizer": describe_arrays(point.state)}
        return Run(identity, self.descent.fingerprint(point))

    def _resume(self, folder: Folder, start: Point, fixed: Any) -> tuple[Point, list[MetaStep], bool]:
        """Where the folder's run stands, checked: (point, history, whether a callback stopped it)."""
        if not folder.claimed and not self._is_finished(folder):
            folder.claim()  # and if there is nothing to write, a folder that cannot be written to is as good
        if not folder.done:
            return start, [], False
        learned = folder.hypers(start)
        history = restored(folder.run, [eqx.combine(h, fixed) for h in learned])
        _check_start(folder, learned[0], start.learned)
        self.evaluation.ledger.capacity = folder.run["capacity"]
        self.evaluation.ledger.room = tuple((name, (words, bits)) for name, words, bits in folder.run["room"])
        self.evaluation.programs.clear()  # those of another start have other room
        if self.meta_steps < len(history):
            return Point(learned[self.meta_steps], start.state), history[: self.meta_steps], True
        try:
            point, reached = folder.point(start, learned)
        except Damaged:
            if not folder.read_again():  # nobody has gone on meanwhile, and removed it
                folder.claim()
            return self._resume(folder, start, fixed)
        if reached == len(history) and self._is_finished(folder):
            return point, history, True
        history = history[:reached]
        if history:
            self._check_again(folder, history[-1], point, fixed)
        return point, history, False

    def _is_finished(self, folder: Folder) -> bool:
        return max(folder.done, folder.run["stopped_at"]) >= self.meta_steps

    def _check_again(self, folder: Folder, last: MetaStep, point: Point, fixed: Any) -> None:
        """Evaluate the last meta-step once more: the same numbers, or else this is not what ran there."""
        evaluated, _ = self.evaluation(split_fixed(last.hypers)[0], fixed, self._key(point, last.step))
        pairs = {
            "value": (last.value, float(evaluated.value), "train_fn, val_fn or their data are not those"),
            "monitor": (last.monitor, float(evaluated.monitor), "monitor_fn or its data are not those"),
        }
        for name, (there, here, otherwise) in pairs.items():
            elsewhere = folder.elsewhere if name == "value" else ""  # said once
            _compare(f"meta-step {last.step} of {folder.path} had the {name}", there, here, otherwise, elsewhere)


def _compare(what: str, there: float, here: float, otherwise: str, elsewhere: str) -> None:
    """An error for a number that is another now, a warning for one that is not quite the same."""
    off = abs(here - there) / max(abs(there), 1e-30)
    same = off <= _SAME or here == there or (math.isnan(here) and math.isnan(there))
    told = f"{what} {there:.8g} and has {here:.8g} now"
    if not off <= _CLOSE and not same:
        raise ValueError(
            f"{told}: {otherwise} of this run. Pass another `checkpoint` folder, or remove this one to start anew."
            f"{f' ({elsewhere}.)' if elsewhere else ''}"
        )
    if elsewhere or not same:
        unknown = "nothing else is known to differ. Were functions or data edited? Then pass another `checkpoint` folder"
        warnings.warn(f"{told}; {elsewhere or unknown}. Going on.", stacklevel=6)


_OTHERWISE = (
    "In several processes all must train on the same arrays (jax.make_array_from_process_local_data makes one of the parts "
    "of each), and callbacks must return the same."
)

# Relative differences of a value that is evaluated again: none but rounding, and what another machine may come to.
_SAME, _CLOSE = 1e-6, 1e-2


def _check_start(folder: Folder, there: Any, here: Any) -> None:
    """Another machine may round what is given in a domain, whose coordinates are of order one, or scale, as all else is."""
    ones, others = (jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_domain) for tree in (there, here))
    for (path, one), (_, other) in zip(ones, others, strict=True):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            a, b = whole(a).astype(np.float64), whole(b).astype(np.float64)
            unit = 1.0 if is_domain(one) else np.max(np.abs(a), initial=0)
            if not np.allclose(a, b, 1e-5, 1e-6 * unit):
                raise ValueError(
                    f"`checkpoint` {folder.path} holds another run: it started from other values of "
                    f"hypers{hyper_path(path)}. Pass another folder, or remove this one to start anew."
                )


def _count(name: str, value: Any) -> int:
    """An integer of Python, whatever kind of integer it was given as."""
    count = as_int(value)
    if count is not None and count >= 1:
        return count
    raise ValueError(f"`{name}` must be an integer of at least 1; got {value!r}.")


def _check_arguments(meta_optimizer: Any, aggregate: Any, skip_nonfinite: Any) -> None:
    if not (hasattr(meta_optimizer, "init") and hasattr(meta_optimizer, "update")):
        raise TypeError(
            f"`meta_optimizer` must be an optax transformation like optax.adam(0.04); got {type(meta_optimizer).__name__}."
        )
    if not isinstance(skip_nonfinite, (bool, np.bool_)):
        raise TypeError(f"`skip_nonfinite` must be True or False; got {describe(skip_nonfinite)}.")
    if aggregate not in (None, "clipped", "mean"):
        raise ValueError(f'`aggregate` must be "clipped", "mean", or None for what suits meta_optimizer; got {aggregate!r}.')


def warn_unused(grads: Any) -> None:
    used = {hyper_path(path): np.any(whole(g) != 0) for path, g in jax.tree_util.tree_leaves_with_path(grads) if g.size}
    if not any(used.values()):
        warnings.warn(
            "the hypergradient is exactly zero in every hyperparameter. Either `val_fn` does not depend on them, or it is "
            "piecewise constant, like an accuracy or an argmax: return a loss instead. Or training sees them only through "
            "hard choices, like the rate of a dropout layer: take hg.concrete_dropout. Or nothing is trained: gradients are "
            "zero at the start, as where all weights are.",
            stacklevel=3,
        )
        return
    for where, is_used in used.items():
        if not is_used:
            warnings.warn(
                f"the hypergradient of hypers{where} is exactly zero everywhere: is it used? "
                "If it is not to be learned, wrap it in hg.fixed; if it is the rate of dropout, take hg.concrete_dropout.",
                stacklevel=3,
            )
