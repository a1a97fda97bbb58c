"""The forward pass: training itself, and what it must keep to be undone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from hypergrad.loop.drivers import Pause
from hypergrad.loop.prints import print_of
from hypergrad.loop.problem import Inputs, Problem, join_steps, split
from hypergrad.loop.small import sizes
from hypergrad.loop.step import Exact, follow, parameters, step


class Seen(NamedTuple):
    """What a pass sees on its way, and the other must see again."""

    losses: Array  # [steps]
    batches: Array | None  # their prints, uint64 [steps]; None where they are functions of t for certain


def forward(
    problem: Problem, inputs: Inputs, state: Exact, turns: dict[str, list[Any]], pause: Pause | None = None
) -> tuple[Exact, Seen, Array]:
    """Train: `step` for t = 0..steps-1 from `state`; also `sizes` of gradients. Call it inside `jax.enable_x64(True)`."""
    constant, stepped = problem.beside(split, inputs.h)
    gradient = problem.maybe_jit(problem.gradient)

    def body(consts: Any, state: Exact, x: Any) -> tuple[Exact, tuple[Seen, Array]]:
        state, seen, g = train_step(problem, gradient, consts, state, x)
        return state, (seen, sizes(x[0], g))

    xs = (jnp.arange(problem.steps, dtype=jnp.int32), stepped, turns)
    end, (seen, of_gradients) = problem.run(body, (constant, inputs.theta, inputs.frozen), state, xs, pause=pause)
    return end, seen, of_gradients


def train_step(
    problem: Problem, gradient: Callable[..., Any], consts: Any, state: Exact, x: Any
) -> tuple[Exact, Seen, list[Array]]:
    """The gradient at the present parameters, which it also returns, then `step` and `follow`."""
    (constant, theta, frozen), (t, stepped, turns) = consts, x
    w, batch = parameters(problem.rule, t, state.z), problem.batch(frozen, t)
    value, g, evidence = problem.gradient_apart(gradient, t, w, theta, frozen, batch)
    h, rates = problem.parts(join_steps(constant, stepped))
    state = step(problem.rule, t, state, h, turns, g)
    state = follow(problem.statistics, t, state, rates, turns, evidence)
    return state, Seen(value, None if problem.functions.sure else print_of(batch)), g
