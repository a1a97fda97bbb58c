"""The forward pass: training itself, and what it must keep to be undone."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from hypergrad.loop.drivers import Pause
from hypergrad.loop.problem import Inputs, Problem, join_steps, split
from hypergrad.loop.step import Exact, follow, parameters, step


def forward(
    problem: Problem, inputs: Inputs, state: Exact, turns: dict[str, list[Any]], pause: Pause | None = None
) -> tuple[Exact, Array]:
    """Train: `step` for t = 0..steps-1 from `state`; also the losses [steps]. Call it inside `jax.enable_x64(True)`."""
    constant, stepped = problem.beside(split, inputs.h)
    gradient = problem.maybe_jit(problem.gradient)

    def body(consts: Any, state: Exact, x: Any) -> tuple[Exact, Array]:
        return train_step(problem, gradient, consts, state, x)

    xs = (jnp.arange(problem.steps, dtype=jnp.int32), stepped, turns)
    return problem.run(body, (constant, inputs.theta, inputs.frozen), state, xs, pause=pause)


def train_step(problem: Problem, gradient: Callable[..., Any], consts: Any, state: Exact, x: Any) -> tuple[Exact, Array]:
    """The gradient at the present parameters, then `step` and `follow`; also the loss."""
    rule = problem.rule
    (constant, theta, frozen), (t, stepped, turns) = consts, x
    w = parameters(rule, t, state.z)
    value, g, seen = problem.apart(t, gradient, w, theta, frozen, problem.batch(frozen, t))
    h, rates = problem.parts(join_steps(constant, stepped))
    state = step(rule, t, state, h, turns, problem.joined(t, g))
    return follow(problem.statistics, t, state, rates, turns, seen), value
