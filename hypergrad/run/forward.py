"""The forward pass: training itself, and what it must keep to be undone.

Invariant: the gradient of each step is computed apart from all else, as `hypergrad.adjoints` computes it again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from hypergrad.exact import Mark
from hypergrad.run.fingerprints import print_of
from hypergrad.run.functions import Frozen
from hypergrad.run.per_step import join_steps, split
from hypergrad.run.plan import Span, by_link, entries_of
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.step import State, final_values, parameters, step
from hypergrad.run.underflow import sizes


class Seen(NamedTuple):
    """What a pass sees on its way, and the other must see again."""

    losses: Array  # [steps]
    batches: Array | None  # their prints, uint64 [steps]; None where they are functions of t for certain
    metrics: Any = ()  # on the way out: scalars, each [steps]


def same_losses(losses: Array, again: Array, apart: bool = True) -> Array:
    """Whether both passes saw the same losses, bool like them: all but the last six bits, or half of the digits where they
    come from beside a derivative.

    Not all bits. XLA:CPU tells LLVM whether a kernel writes over one of its operands, as it may in one pass alone, and by
    that LLVM fuses one product of a sum or another. No derivative depends on the value of a loss; gradients must have the
    same bits, or the state does not come back.
    """
    eps = float(jnp.finfo(losses.dtype).eps)
    tolerance = min(2**6 * eps, eps**0.5) if apart else eps**0.5
    return jnp.abs(losses - again) <= tolerance * jnp.maximum(jnp.abs(losses), jnp.abs(again))


def forward(run: Run, inputs: Inputs, state: State, xs: Any) -> tuple[State, Seen, Array]:
    """Train: `step` at the steps of xs, as `steps_of` gives them; also `sizes` of gradients.

    Call it inside `jax.enable_x64(True)`.
    """
    constant, _ = run.outside_loop(split, inputs.h)
    theta, _ = run.functions.theta.parted(inputs.theta)
    gradient = run.maybe_jit(run.gradient)

    def body(consts: Any, state: State, x: Any) -> tuple[State, tuple[Seen, Array]]:
        state, seen, g = train_step(run, gradient, consts, state, x)
        return state, (seen, sizes(run, x[0], g))

    end, (seen, of_gradients) = run.loop(body, (constant, theta, inputs.frozen), state, xs)
    return end, seen, of_gradients


def steps_of(run: Run, inputs: Inputs, entries: list[Any], others: Any = None) -> Any:
    """(t, (hyperparameters and theta per step, others), entries) of all steps.

    entries: of each schedule, with a leading axis of steps; others: what else has such an axis.
    """
    return jnp.arange(run.steps, dtype=jnp.int32), _by_step(run, inputs, others), entries


def steps_within(run: Run, inputs: Inputs, before: list[Mark], span: Span, others: Any = None) -> Any:
    """`steps_of` a span, before which stacks are empty. before: where each schedule stands there."""
    by_step = span.of(_by_step(run, inputs, others))
    first = jnp.asarray(span.first, jnp.int32)
    entries = run.outside_loop(entries_of, inputs.h, before, first, static=(span.length,))
    return first + jnp.arange(span.length, dtype=jnp.int32), by_step, entries


def _by_step(run: Run, inputs: Inputs, others: Any) -> Any:
    _, stepped = run.outside_loop(split, inputs.h)
    _, theta_stepped = run.functions.theta.parted(inputs.theta)
    return (stepped, theta_stepped), others


def train_step(run: Run, gradient: Callable[..., Any], consts: Any, state: State, x: Any) -> tuple[State, Seen, list[Array]]:
    """The signals at the present parameters, then `step`; also the gradient."""
    (constant, theta, frozen), (t, ((stepped, theta_stepped), _), entries) = consts, x
    w, batch = parameters(run, t, state), run.batch(frozen, t)
    theta = theta_of_step(run, t, theta, theta_stepped, frozen, batch)[0]
    value, g, statistics = run.isolated_gradient(gradient, t, w, theta, frozen, batch)
    signals = run.signals(g, statistics, run.more_signals(t, w, theta, frozen, batch))
    metrics = run.metrics(t, final_values(run, state)[: len(run.parameters)], theta, frozen, batch)
    state = step(run, t, state, join_steps(constant, stepped), by_link(run, entries), signals)
    return state, Seen(value, None if run.functions.sure else print_of(batch), metrics), g


def theta_of_step(
    run: Run, t: Array, constant: list[Array], stepped: list[Array], frozen: Frozen, batch: list[Any]
) -> tuple[list[Array], list[list[Array]]]:
    """(what the loss takes of theta at a step, the indices of what it reads); of the two parts of `StepTheta.parted`."""
    whole = run.functions.theta.together(constant, stepped)
    indices = run.indices(t, whole, frozen, batch)
    return run.functions.theta.seen(whole, indices), indices
