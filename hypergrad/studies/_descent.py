"""The meta-optimizer along a chain: from the trials so far to the next point.

Coordinates: log x of a `log=True` number, as in `hg.positive`, kept inside its bounds; for another number
log(p / (1 - p)) of p = (x - low) / (high - low), as in `hg.bounded`; the elements of a tree as they are stored.
Invariant: all of it is replayed from the trials; what is remembered only saves time.
"""

import functools
import threading
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from optuna.trial import FrozenTrial

from hypergrad.studies import _marks
from hypergrad.studies._chains import Chain, is_free


_MARGIN = 1e-3  # of an interval: a number at its very bound has no finite coordinate, and starts so far inside
_LEAST = 1e-12  # of an interval: how near to a bound descent comes
_BACK_OFF = 0.25  # of the update, for each attempt that failed
_REMEMBERED = 64  # chains


class Axes(NamedTuple):
    """Numbers of a trial that descend. low, high: float64 [names]; log: bool [names]."""

    names: tuple[str, ...]
    low: np.ndarray
    high: np.ndarray
    log: np.ndarray

    @staticmethod
    def of(trial: FrozenTrial, names: tuple[str, ...]) -> "Axes":
        distributions: Any = [trial.distributions[name] for name in names]
        bounds = np.array([(d.low, d.high, d.log) for d in distributions], np.float64).reshape(-1, 3)
        return Axes(names, bounds[:, 0], bounds[:, 1], bounds[:, 2] > 0)

    def unconstrained(self, x: np.ndarray) -> np.ndarray:
        p = self._inside(x)
        return np.where(self.log, np.log(np.where(self.log, x, 1.0)), np.log(p) - np.log1p(-p))

    def natural(self, u: np.ndarray) -> np.ndarray:
        """The inverse, within the bounds."""
        p = 1 / (1 + np.exp(-np.clip(np.where(self.log, 0.0, u), np.log(_LEAST), -np.log(_LEAST))))
        bounded = self.low + (self.high - self.low) * p
        largest = np.log(np.where(self.log, self.high, 1.0))
        positive = np.exp(np.minimum(np.where(self.log, u, 0.0), largest))
        return np.clip(np.where(self.log, positive, bounded), self.low, self.high)

    def slope(self, x: np.ndarray) -> np.ndarray:
        """dx/du."""
        p = self._inside(x)
        return np.where(self.log, x, (self.high - self.low) * p * (1 - p))

    def _inside(self, x: np.ndarray) -> np.ndarray:
        p = (x - self.low) / (self.high - self.low)
        return np.where((p > 0) & (p < 1), p, np.clip(p, _MARGIN, 1 - _MARGIN))


class Point(NamedTuple):
    """A trial in the coordinates of descent: numbers first, then the elements of its tree."""

    axes: Axes
    leaves: dict[str, str]  # of the tree, without types: a worker with another setting of x64 goes on
    position: np.ndarray
    gradient: np.ndarray
    value: float


def point(trial: FrozenTrial, sign: float) -> Point:
    """Of a trial that counts. sign: +1 to minimize, -1 to maximize."""
    gradient, tree = _marks.read_gradient(trial), _marks.read_tree(trial.system_attrs)
    assert gradient is not None and trial.value is not None
    free = [i for i, name in enumerate(gradient.names) if is_free(trial, name)]
    free.sort(key=lambda i: gradient.names[i])  # a chain's coordinates, in whatever order they are reported
    axes = Axes.of(trial, tuple(gradient.names[i] for i in free))
    x = np.array([trial.params[name] for name in axes.names], np.float64)
    elements = np.zeros(0) if tree is None or not gradient.tree.size else tree.elements
    return Point(
        axes,
        {} if tree is None else _marks.untyped(tree.leaves),
        np.concatenate([axes.unconstrained(x), elements]),
        sign * np.concatenate([gradient.numbers[free] * axes.slope(x), gradient.tree]),
        sign * trial.value,
    )


class Proposal(NamedTuple):
    """The next point of a chain, in natural units; elements: of the tree, None without one."""

    params: dict[str, Any]
    elements: np.ndarray | None


class _Known(NamedTuple):
    """How far a chain has been replayed. seen: all that was read of its trials, by their hashes."""

    seen: tuple[int, ...]
    here: Point
    state: Any
    update: np.ndarray


class Descent:
    """One meta-optimizer for all chains. It sees the coordinates of a trial as one float64 vector."""

    def __init__(self, meta_optimizer: optax.GradientTransformation) -> None:
        self.meta_optimizer = meta_optimizer
        self.known: dict[tuple[str, int], _Known] = {}
        self.lock = threading.Lock()

    def next(self, study: str, chain: Chain, sign: float) -> Proposal:
        """What no gradient moves stays as it is at the chain's last trial."""
        known = self._replayed(study, chain, sign)
        here = known.here
        there = here.position + _BACK_OFF**chain.failures * known.update
        count = len(here.axes.names)
        moved = here.axes.natural(there[:count]).tolist()
        elements = there[count:] if count < len(there) else None
        return Proposal({**chain.head.params, **dict(zip(here.axes.names, moved, strict=True))}, elements)

    def _replayed(self, study: str, chain: Chain, sign: float) -> _Known:
        """Another study may have the name of one that was removed."""
        seen = tuple(_content(trial, sign) for trial in chain.trials)
        known = self.known.get((study, chain.number))
        if known is not None and known.seen != seen[: len(known.seen)]:
            known = None
        for i in range(len(known.seen) if known else 0, len(seen)):
            known = self._after(known, seen[: i + 1], chain.trials[i], sign)
        assert known is not None
        with self.lock:
            self.known[study, chain.number] = known
            while len(self.known) > _REMEMBERED:
                del self.known[next(iter(self.known))]
        return known

    def _after(self, known: _Known | None, seen: tuple[int, ...], trial: FrozenTrial, sign: float) -> _Known:
        here = point(trial, sign)
        init, update = _compiled(self.meta_optimizer)
        with jax.enable_x64(True):
            same = known is not None and _alike(known.here, here)
            state = known.state if known is not None and same else init(here.position)
            moved, state = update(here.gradient, state, here.position, here.value)
            return _Known(seen, here, state, np.asarray(moved))


def _content(trial: FrozenTrial, sign: float) -> int:
    params = tuple(sorted((name, repr(x), repr(trial.distributions[name])) for name, x in trial.params.items()))
    return hash((trial.number, sign, repr(trial.value), params, *_marks.texts(trial)))


def _alike(a: Point, b: Point) -> bool:
    """Whether they have the same coordinates."""
    return a.axes.names == b.axes.names and a.leaves == b.leaves and len(a.position) == len(b.position)


@functools.lru_cache(maxsize=16)
def _compiled(meta_optimizer: optax.GradientTransformation) -> tuple[Any, Any]:
    rule = optax.with_extra_args_support(meta_optimizer)
    return jax.jit(rule.init), jax.jit(lambda g, state, x, value: rule.update(g, state, x, value=value, grad=g))


def check_rule(meta_optimizer: optax.GradientTransformation) -> None:
    """TypeError for one that cannot do a step from the value and gradient of one trial; traced only."""
    init, update = _compiled(meta_optimizer)
    with jax.enable_x64(True):
        x, value = jax.ShapeDtypeStruct((1,), np.float64), jax.ShapeDtypeStruct((), np.float64)
        try:
            jax.eval_shape(update, x, jax.eval_shape(init, x), x, value)
        except Exception as error:
            raise TypeError(
                "`meta_optimizer` must be an optax transformation of one vector that needs no more than the value and the "
                f"gradient of a trial, like optax.adam(0.1); this one asks for more ({error}). One that searches along a "
                "line, like optax.lbfgs(), is for hg.optimize."
            ) from error
