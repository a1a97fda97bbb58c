"""The forward pass: training itself, and what it must keep to be undone."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from hypergrad.exact import largest
from hypergrad.loop.drivers import Pause
from hypergrad.loop.problem import Inputs, Problem, join_steps, split
from hypergrad.loop.step import Exact, Rule, follow, settled, step
from hypergrad.optimizers.chain import Link


class Forward(NamedTuple):
    """What the forward pass leaves behind."""

    end: Exact
    losses: Array  # [steps]
    magnitudes: Array  # float32 [steps + 1, places]: max |z| before the first and after each step


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
    """The gradient at the present parameters, then `step` and `follow`; also (loss, max |w| before, max |z| of all else)."""
    rule = problem.rule
    (constant, theta, frozen), (t, stepped, turns) = consts, x
    w = settled(rule.layout.split(rule.decoded(state.z, rule.chain[-1])))
    entering = jnp.stack([largest(x) for x in w])  # w is at hand here; what step t leaves is seen at t + 1
    value, g, seen = problem.apart(t, gradient, w, theta, frozen, problem.batch(frozen, t))
    g = problem.joined(t, g)
    h, rates = problem.parts(join_steps(constant, stepped))
    state, others = step(rule, state, h, turns, g)
    state = follow(problem.statistics, state, rates, turns, seen)
    means = [r.magnitudes(state.z, link).reshape(-1) for r in problem.statistics for link in r.chain]
    return state, (value, entering, (others.reshape(-1), means))


def in_order(problem: Problem, start: Exact, end: Exact, entering: Array, rest: Any) -> Array:
    """The magnitudes of `train_step` as before the first and after each step: float32 [steps + 1, places]."""
    rule, (others, means) = problem.rule, rest
    *accumulators, params = rule.chain

    def with_first(rule: Rule, links: Sequence[Link], after: Array) -> Array:
        return jnp.concatenate([jnp.concatenate([rule.magnitudes(start.z, link) for link in links])[None], after])

    w = jnp.concatenate([entering, rule.magnitudes(end.z, params)[None]])
    followed = [with_first(r, r.chain, after) for r, after in zip(problem.statistics, means, strict=True)]
    return jnp.concatenate([with_first(rule, accumulators, others), w, *followed], axis=1)
