"""What each road should cost: gradient evaluations and bytes, as functions of the number of steps and of the model's sizes.

Predicted, not fitted: sizes come from shapes, operations from XLA's count for one step. Leading terms only: dispatch, memory
traffic, and the exact layer's own time (nanoseconds per parameter and step, which is measured) are not in them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from experiments import memory
from experiments.benchmarks import opponents
from experiments.benchmarks.workloads import Task


class Sizes(NamedTuple):
    """Of one task."""

    parameters: int
    state: int  # bytes of (w, v) in float32
    step: int  # bytes that the derivative of one step reads again: states and activations
    pull: float  # operations of the derivative of a step, in those of a gradient
    tangent: float  # operations of the derivative of a gradient along one direction, in those of a gradient


class Law(NamedTuple):
    """Of one road, for T steps."""

    gradients: Callable[[int], float]  # evaluations of a gradient, those in replays among them
    states: Callable[[int], float]  # (w, v) pairs that are kept
    steps: Callable[[int], float]  # steps whose activations are kept
    derivatives: str = "pull"  # what goes back costs, a field of `Sizes` per step; "": nothing goes back
    integers: bool = False  # whether the grid's integers and buffers are kept

    def time(self, sizes: Sizes, steps: int) -> float:
        """In units of training."""
        return self.gradients(steps) / steps + (getattr(sizes, self.derivatives) if self.derivatives else 0.0)

    def bytes(self, sizes: Sizes, steps: int) -> float:
        grid = 0.0
        if self.integers:
            # w and v; the words; and as floats w, g and two cotangents.
            grid = sizes.parameters * (8 * 2 + 4 * float(memory.words(0.9, steps)) + 4 * 4)
        return grid + self.states(steps) * sizes.state + self.steps(steps) * sizes.step


def sizes(task: Task) -> Sizes:
    start = jax.eval_shape(lambda: opponents.start(task))
    t, a = jax.ShapeDtypeStruct((), "int32"), jax.ShapeDtypeStruct((), "float32")
    pullback = lambda state, t, a: jax.vjp(lambda state, a: opponents.step(task, state, t, a), state, a)  # noqa: E731
    gradient = lambda state, t: jax.grad(task.loss)(state[0], task.batch(t))  # noqa: E731

    def tangent(state: Any, t: Array) -> Any:
        return jax.jvp(lambda w: jax.grad(task.loss)(w, task.batch(t)), (state[0],), (state[1],))

    residuals = jax.eval_shape(lambda *x: pullback(*x)[1], start, t, a)
    unit = _operations(gradient, start, t)
    both = _operations(lambda state, t, a, ct: pullback(state, t, a)[1](ct), start, t, a, start)
    along = _operations(lambda *x: tangent(*x), (start[0], start[0]), t)
    return Sizes(task.parameters, _bytes(start), _bytes(residuals), both / unit - 1, along / unit - 1)


def _operations(function: Callable[..., Any], *shapes: Any) -> float:
    program = jax.jit(function).lower(*shapes)
    return (program.cost_analysis() or program.compile().cost_analysis())["flops"]  # on a GPU compiled ones alone know


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def binomial(steps: int, checkpoints: int) -> float:
    """Gradient evaluations of binomial checkpointing: the way out, replays, and once more where each is differentiated."""
    replays = next(r for r in range(1, steps + 1) if math.comb(checkpoints + r, r) >= steps)
    return steps + replays * steps - math.comb(checkpoints + replays, replays - 1)


def equinox_default(steps: int) -> int:
    """The number of checkpoints that equinox takes by itself."""
    return max(1, math.floor(-1.5 + math.sqrt(2 * steps + 0.25)) + 1)


@functools.cache
def replays(steps: int, arity: int) -> int:
    """Steps that `loops` replays to go back through a stretch that has been entered."""
    if steps == 1:
        return 0
    pieces = min(arity, steps)
    cuts = [steps * i // pieces for i in range(pieces + 1)]
    return cuts[-2] + sum(replays(high - low, arity) for low, high in zip(cuts, cuts[1:], strict=False))


def _nested(shape: Callable[[int], tuple[int, ...]]) -> Law:
    """Scans inside each other: out, and once more for each of them."""
    return Law(lambda t: (1 + len(shape(t))) * t, lambda t: sum(shape(t)), lambda t: 1)


def _looped(arity: Callable[[int], int]) -> Law:
    def gradients(steps: int) -> float:
        pieces = min(arity(steps), steps)
        first = steps - steps * (pieces - 1) // pieces  # the last piece is entered and trained through at once
        return 2 * steps + replays(steps, arity(steps)) - (steps - first)

    def states(steps: int) -> float:
        return arity(steps) * max(1, math.ceil(math.log(steps, arity(steps)) - 1e-9)) if steps > 1 else 1

    return Law(gradients, states, lambda t: 1)


def _stored() -> Law:
    return Law(lambda t: t, lambda t: 0, lambda t: t)


_PLAIN = Law(lambda t: t, lambda t: 1, lambda t: 0, "")
_EXACT = Law(lambda t: t, lambda t: 0, lambda t: 0, "", integers=True)
_REVERSIBLE = Law(lambda t: 2 * t, lambda t: 0, lambda t: 1, "tangent", integers=True)

LAWS = {
    "plain training, scan": _PLAIN,
    "plain training, loop": _PLAIN,
    "exact training, scan": _EXACT,
    "exact training, as hg.optimize compiles": _EXACT,
    "hg.Reversible, scan": _REVERSIBLE,
    "hg.Reversible, as hg.optimize compiles": _REVERSIBLE,
    "hg.Reversible, host": _REVERSIBLE,
    "unroll": _stored(),
    "remat": _nested(lambda t: (t,)),
    "sqrt-remat": _nested(opponents.halves),
    "equinox, 8 states": Law(lambda t: binomial(t, 8), lambda t: min(8, t), lambda t: 1),
    "equinox, default": Law(lambda t: binomial(t, equinox_default(t)), equinox_default, lambda t: 1),
    "replay tree, 4-ary": _nested(functools.partial(opponents.branches, arity=4)),
    "unroll, loop": _stored(),
    "remat, loop": _looped(lambda t: t),
    "sqrt-remat, loop": _looped(lambda t: math.isqrt(t - 1) + 1),
    "replay tree, 4-ary, loop": _looped(lambda t: 4),
}
