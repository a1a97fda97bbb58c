"""The forward pass: training itself, and what it must keep to be undone.

Invariant: the gradient of each step is computed apart from all else, as `hypergrad.adjoints` computes it again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.run.drivers import Pause
from hypergrad.run.fingerprints import print_of
from hypergrad.run.functions import Frozen
from hypergrad.run.spec import Inputs, Run, by_link, join_steps, split
from hypergrad.run.step import State, parameters, step
from hypergrad.run.underflow import sizes


class Seen(NamedTuple):
    """What a pass sees on its way, and the other must see again."""

    losses: Array  # [steps]
    batches: Array | None  # their prints, uint64 [steps]; None where they are functions of t for certain


class Span(NamedTuple):
    """Steps in a row."""

    first: Any  # int, or int32 [] inside of a loop over spans
    length: int


def forward(
    run: Run,
    inputs: Inputs,
    state: State,
    entries: list[Any],
    pause: Pause | None = None,
    span: Span | None = None,
) -> tuple[State, Seen, Array]:
    """Train: `step` at all steps, or those of a span; also `sizes` of gradients.

    Call it inside `jax.enable_x64(True)`. entries: of all steps, with a leading axis, for each schedule. Words of a span are
    counted from its first.
    """
    constant, stepped = run.outside_loop(split, inputs.h)
    theta, theta_stepped = run.functions.theta.parted(inputs.theta)
    gradient = run.maybe_jit(run.gradient)

    def body(consts: Any, state: State, x: Any) -> tuple[State, tuple[Seen, Array]]:
        state, seen, g = train_step(run, gradient, consts, state, x)
        return state, (seen, sizes(x[0], g))

    xs = (steps_of(run, span), of_span(span, (stepped, theta_stepped)), entries_of(span, entries))
    end, (seen, of_gradients) = run.loop(body, (constant, theta, inputs.frozen), state, xs, pause=pause)
    return end, seen, of_gradients


def steps_of(run: Run, span: Span | None) -> Array:
    """Their numbers: int32 [length]."""
    return jnp.arange(run.steps, dtype=jnp.int32) if span is None else span.first + jnp.arange(span.length, dtype=jnp.int32)


def of_span(span: Span | None, tree: Any) -> Any:
    """Of what has a leading axis of all steps."""
    return tree if span is None else jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, *span), tree)


def entries_of(span: Span | None, entries: list[Any]) -> list[Any]:
    """Of each schedule, with words counted from the first of the span."""
    return entries if span is None else [of_span(span, entry).restarted() for entry in entries]


def train_step(run: Run, gradient: Callable[..., Any], consts: Any, state: State, x: Any) -> tuple[State, Seen, list[Array]]:
    """The signals at the present parameters, then `step`; also the gradient."""
    (constant, theta, frozen), (t, (stepped, theta_stepped), entries) = consts, x
    w, batch = parameters(run, t, state), run.batch(frozen, t)
    theta = theta_of_step(run, t, theta, theta_stepped, frozen, batch)[0]
    value, g, statistics = run.isolated_gradient(gradient, t, w, theta, frozen, batch)
    signals = run.signals(g, statistics, run.more_signals(t, w, theta, frozen, batch))
    state = step(run, t, state, join_steps(constant, stepped), by_link(run, entries), signals)
    return state, Seen(value, None if run.functions.sure else print_of(batch)), g


def theta_of_step(
    run: Run, t: Array, constant: list[Array], stepped: list[Array], frozen: Frozen, batch: list[Any]
) -> tuple[list[Array], list[list[Array]]]:
    """(what the loss takes of theta at a step, the indices of what it reads); of the two parts of `StepTheta.parted`."""
    whole = run.functions.theta.together(constant, stepped)
    indices = run.indices(t, whole, frozen, batch)
    return run.functions.theta.seen(whole, indices), indices
