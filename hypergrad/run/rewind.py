"""Back over some steps without derivatives, from the state after them.

Invariant: `rewound(forward(state)) == state`, bit for bit, and what it sees on the way are the losses of training.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad._isolation import kernel_by_kernel
from hypergrad.exact import Mark
from hypergrad.run.forward import same_losses, theta_of_step
from hypergrad.run.per_step import join_steps, split
from hypergrad.run.plan import by_link, entries_of
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.step import Signals, State, unstep


def rewound(
    run: Run,
    length: int,
    inputs: Inputs,
    before: list[Mark],
    losses: Array,
    state: State,
    first: Array,
    last: Array,
    count: Array,
) -> tuple[State, Array]:
    """The state before the steps last - count, ..., last - 1, from that after them; and whether the losses came again.

    first: the step before which the state's stacks were empty; length: of the steps from there to where they are emptied
    again; before: where schedules stand at `first`. All three int32 [], so that one program goes any way. Call it inside
    `jax.enable_x64(True)`.
    """
    constant, stepped = split(run, inputs.h)
    theta, theta_stepped = run.functions.theta.parted(inputs.theta)
    held = inputs, before, state
    entries = entries_of(run, length, inputs.h, before, first)

    def body(i: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        state, same = carry
        t = kernel_by_kernel(last - 1 - i, held)
        here = jax.tree.map(lambda x: x[t], (stepped, theta_stepped))
        own = jax.tree.map(lambda x: x[t - first], entries)
        state, loss = _back(run, inputs, t, state, (constant, theta), here, own)
        return state, same & same_losses(loss, losses[t])

    return jax.lax.fori_loop(0, count, body, (state, jnp.bool_(True)))


def _back(run: Run, inputs: Inputs, t: Array, state: State, constant: Any, here: Any, entries: Any) -> tuple[State, Array]:
    (h, theta), (stepped, theta_stepped) = constant, here
    batch, losses = run.batch(inputs.frozen, t), []
    theta, _ = theta_of_step(run, t, theta, theta_stepped, inputs.frozen, batch)

    def again(w: list[Array]) -> Signals:
        value, g, statistics = run.isolated_gradient(run.gradient, t, w, theta, inputs.frozen, batch)
        losses.append(value)
        return run.signals(g, statistics, run.more_signals(t, w, theta, inputs.frozen, batch))

    state = unstep(run, t, state, join_steps(h, stepped), by_link(run, entries), again)
    return state, losses[0]
