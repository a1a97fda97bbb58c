"""The forward pass: training itself, and what it must keep to be undone."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from hypergrad.exact import largest
from hypergrad.loop.problem import Inputs, Problem, join_steps, split_steps
from hypergrad.loop.step import Exact, settled, step


class Forward(NamedTuple):
    """What the forward pass leaves behind."""

    end: Exact
    losses: Array  # [steps]
    magnitudes: Array  # float32 [steps, links, leaves]: max |z| after each step


def forward(problem: Problem, inputs: Inputs, state: Exact, turns: dict[str, list[Any]]) -> Forward:
    """Train: `step` for t = 0..steps-1 from `state`. Call it inside `jax.enable_x64(True)`."""
    rule, params = problem.rule, problem.rule.chain[-1]
    constant, stepped = split_steps(inputs.h, problem.steps)
    gradient = problem.maybe_jit(problem.gradient)

    def body(consts: Any, state: Exact, x: Any) -> tuple[Exact, Any]:
        constant, theta, frozen = consts
        t, stepped, turns = x
        w = settled(rule.decoded(state.z, params))
        entering = jnp.stack([largest(x) for x in w])  # w is at hand here; what step t leaves is seen at t + 1
        value, g = gradient(w, theta, frozen, t)
        state, magnitudes = step(rule, state, join_steps(constant, stepped), turns, g)
        return state, (value, entering, magnitudes)

    xs = (jnp.arange(problem.steps, dtype=jnp.int32), stepped, turns)
    end, (losses, entering, others) = problem.run(body, (constant, inputs.theta, inputs.frozen), state, xs)
    left = jnp.concatenate([entering[1:], rule.magnitudes(end.z, params)[None]])
    return Forward(end, losses, jnp.concatenate([others, left[:, None]], axis=1))
