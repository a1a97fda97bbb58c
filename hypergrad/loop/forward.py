"""The forward pass: training itself, and what it must keep to be undone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from hypergrad.exact import largest
from hypergrad.loop.drivers import Pause
from hypergrad.loop.problem import Inputs, Problem, join_steps, split
from hypergrad.loop.step import Exact, settled, step


class Forward(NamedTuple):
    """What the forward pass leaves behind."""

    end: Exact
    losses: Array  # [steps]
    magnitudes: Array  # float32 [steps + 1, links, leaves]: max |z| before the first and after each step


def forward(
    problem: Problem, inputs: Inputs, state: Exact, turns: dict[str, list[Any]], pause: Pause | None = None
) -> Forward:
    """Train: `step` for t = 0..steps-1 from `state`. Call it inside `jax.enable_x64(True)`."""
    constant, stepped = problem.beside(split, inputs.h)
    gradient = problem.maybe_jit(problem.gradient)

    def body(consts: Any, state: Exact, x: Any) -> tuple[Exact, Any]:
        return train_step(problem, gradient, consts, state, x)

    xs = (jnp.arange(problem.steps, dtype=jnp.int32), stepped, turns)
    end, (losses, entering, others) = problem.run(body, (constant, inputs.theta, inputs.frozen), state, xs, pause=pause)
    return Forward(end, losses, problem.beside(in_order, state, end, entering, others))


def train_step(problem: Problem, gradient: Callable[..., Any], consts: Any, state: Exact, x: Any) -> tuple[Exact, Any]:
    """The gradient at the present parameters, then `step`; also (loss, max |w| before, max |z_k| of the others after)."""
    rule = problem.rule
    (constant, theta, frozen), (t, stepped, turns) = consts, x
    w = settled(rule.decoded(state.z, rule.chain[-1]))
    entering = jnp.stack([largest(x) for x in w])  # w is at hand here; what step t leaves is seen at t + 1
    value, g = problem.apart(t, gradient, w, theta, frozen, problem.batch(frozen, t))
    state, others = step(rule, state, join_steps(constant, stepped), turns, g)
    return state, (value, entering, others)


def in_order(problem: Problem, start: Exact, end: Exact, entering: Array, others: Array) -> Array:
    """The magnitudes of `train_step` as before the first and after each step: float32 [steps + 1, links, leaves]."""
    rule = problem.rule
    w = jnp.concatenate([entering[1:], rule.magnitudes(end.z, rule.chain[-1])[None]])
    return jnp.concatenate([rule.all_magnitudes(start.z)[None], jnp.concatenate([others, w[:, None]], axis=1)])
