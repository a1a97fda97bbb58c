"""The same roads as Python loops over jitted steps, for models that XLA:CPU runs slowly inside a scan.

Every function has the signature task -> (learning rates -> hypergradient, or the loss for `plain`): what is jitted is jitted
once, by the outer call.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.benchmarks import opponents
from experiments.benchmarks.workloads import Task


Run = Callable[[Array], Array]


def plain(task: Task) -> Run:
    step, validation = jax.jit(functools.partial(opponents.step, task)), jax.jit(task.validation)

    def run(learning_rates: Array) -> Array:
        state = opponents.start(task)
        for t, a in enumerate(np.asarray(learning_rates)):
            state = step(state, np.int32(t), a)
        return validation(state[0])

    return run


def unrolled(task: Task) -> Run:
    """Store every step with its activations: the leaves of its pullback."""
    forward = jax.jit(lambda state, t, a: jax.vjp(lambda state, a: opponents.step(task, state, t, a), state, a))
    backward = jax.jit(lambda pullback, ct: pullback(ct))

    def run(learning_rates: Array) -> Array:
        state, tape, slopes = opponents.start(task), [], []
        for t, a in enumerate(np.asarray(learning_rates)):
            state, pullback = forward(state, np.int32(t), a)
            tape.append(pullback)
        ct = end_cotangent(state)
        while tape:
            ct, slope = backward(tape.pop(), ct)
            slopes.append(slope)
        return jnp.stack(slopes[::-1])

    end_cotangent = _end_cotangent(task)
    return run


def remat(task: Task) -> Run:
    return _replayed(task, task.steps)


def sqrt_remat(task: Task) -> Run:
    return _replayed(task, math.isqrt(task.steps - 1) + 1)


def tree(task: Task, arity: int = 4) -> Run:
    return _replayed(task, arity)


def _replayed(task: Task, arity: int) -> Run:
    """Cut a stretch of steps into `arity` pieces, keep the states between them, and go backwards through the pieces."""
    step, end_cotangent = jax.jit(functools.partial(opponents.step, task)), _end_cotangent(task)

    @jax.jit
    def pull(state: Any, t: Array, a: Array, ct: Any) -> Any:
        return jax.vjp(lambda state, a: opponents.step(task, state, t, a), state, a)[1](ct)

    def run(learning_rates: Array) -> Array:
        rates, slopes = np.asarray(learning_rates), [None] * task.steps

        def states(state: Any, cuts: list[int]) -> list[Any]:
            """Those at the cuts, the first of them given."""
            found = [state]
            for low, high in zip(cuts, cuts[1:], strict=False):
                for t in range(low, high):
                    state = step(state, np.int32(t), rates[t])
                found.append(state)
            return found

        def back(stack: list[Any], cuts: list[int], ct: Any) -> Any:
            """The cotangent before the stretch, from that after it; `stack`: the states at all cuts but the last."""
            for low, high in zip(cuts[-2::-1], cuts[:0:-1], strict=True):
                state = stack.pop()
                if high - low == 1:
                    ct, slopes[low] = pull(state, np.int32(low), rates[low], ct)
                else:
                    inner = _cuts(low, high, arity)
                    ct = back(states(state, inner[:-1]), inner, ct)
            return ct

        cuts = _cuts(0, task.steps, arity)
        *stack, end = states(opponents.start(task), cuts)
        back(stack, cuts, end_cotangent(end))
        return jnp.stack(slopes)

    return run


def _cuts(low: int, high: int, arity: int) -> list[int]:
    """`low`, `high`, and between them so many places that there are at most `arity` pieces, as equal as can be."""
    pieces = min(arity, high - low)
    return [low + (high - low) * i // pieces for i in range(pieces + 1)]


def _end_cotangent(task: Task) -> Callable[[Any], Any]:
    return jax.jit(jax.grad(lambda state: task.validation(state[0])))
