"""The inverse law of optimizers on extreme integers: `unstep(step(state, s), s) == state`, bit for bit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._isolation import kernel_by_kernel
from hypergrad._meshes import in_automatic_axes
from hypergrad._problem import Problem
from hypergrad._set_up import set_up
from hypergrad._settings import own_settings
from hypergrad.batches import full_batch
from hypergrad.exact import WORD_BITS, Fixed, Heads, grid_range
from hypergrad.optimizers.block import Block, Floats
from hypergrad.optimizers.chain import GRADIENT, Link, Optimizer
from hypergrad.run.per_step import join_steps, split_steps
from hypergrad.run.plan import by_link, schedules
from hypergrad.run.spec import Run
from hypergrad.run.status import most_words
from hypergrad.run.step import Slot, State, initial_state, map_state, step, unstep


_EXTREMES = (0, -1, 1, 2**16 - 1, -(2**16), 2**60, -(2**60), 2**61 - 1, -(2**61) + 1)
_LOW_EXTREMES = (0, 1, 2**16 - 1, 2**31, 2**46 - 1)  # of the low limb of a wide link


@in_automatic_axes
def check_inverse(optimizer: Optimizer, params: Any = None, *, steps: int = 20, seed: int = 0) -> None:
    """Assert `unstep(step(state, g), g) == state` bit for bit, over `steps` random gradients and extreme integers.

    params: pytree of floats whose shapes the optimizer's hyperparameters fit; None: one float32 [3, 4] leaf. Weights that
    extreme integers drive out of their range start afresh. Raises AssertionError naming the step, link and leaf that did not
    come back.
    """
    params = {"w": jnp.zeros((3, 4), jnp.float32)} if params is None else params
    run, inputs, _ = set_up(Problem(_nothing, params, optimizer, full_batch(()), steps=steps))
    rng = np.random.default_rng(seed)
    with own_settings():
        plan = schedules(run, inputs.h)
        words = int(most_words(plan))
        signals = [_signals(rng, steps, block, own) for block, own in zip(run.blocks, inputs.values, strict=True)]
        constant, stepped = split_steps(inputs.h, steps)
        fresh = initial_state(run, inputs.values, tuple((words,) * len(block.chain) for block in run.blocks))
        state: State = map_state(lambda block, link, slot: _drawn(rng, block, link, slot), run, fresh)
        compiled = jax.jit(_there_and_back, static_argnums=0)
        for _ in range(5):
            xs = (jnp.arange(steps, dtype=jnp.int32), stepped, [schedule.entries for schedule in plan], signals)
            there, back, lost = compiled(run, constant, state, xs)
            if not any(x.any() for x in lost):
                return _compare(run, *jax.tree.map(np.asarray, (there, back)))
            state = [
                {n: _afresh(flags, own[n], new[n]) for n in own} for flags, own, new in zip(lost, state, fresh, strict=True)
            ]
    raise AssertionError("values leave the range of their grids from a fresh start: take smaller hyperparameters to check.")


def _nothing(params: Any, theta: Any, batch: Any) -> Array:
    del params, theta, batch
    return jnp.zeros(())


def _signals(rng: np.random.Generator, steps: int, block: Block, values: Floats) -> dict[str, Array]:
    """{signal: random ones of all steps}"""
    like = {GRADIENT: jax.ShapeDtypeStruct(block.shape, block.dtype)}
    like |= {link.signal: block.seen(link, values) for link in block.chain if link.signal != GRADIENT}
    return {name: jnp.asarray(rng.normal(size=(steps, *x.shape)), x.dtype) for name, x in like.items()}


def _drawn(rng: np.random.Generator, block: Block, link: Link, slot: Slot) -> Slot:
    """Integers for a link: extremes, and as many of ordinary size."""
    value, bits, extremes = slot.value, block.bits(link), list(_EXTREMES)
    if value.scale is not None:  # as large at the full scale
        extremes, bits = [int(e / value.scale[0]) if abs(e) > 2**32 else e for e in extremes], bits - WORD_BITS
    value = value._replace(high=_integers(rng, value.high, extremes, bits))
    if value.low is not None:
        value = value._replace(low=jnp.asarray(rng.choice(_LOW_EXTREMES, value.shape)))
    return slot._replace(value=value)


def _integers(rng: np.random.Generator, like: Array, extremes: Sequence[int], bits: int) -> Array:
    ordinary = (rng.normal(size=like.shape) * 2.0**bits).astype(np.int64)
    return jnp.asarray(np.where(rng.random(like.shape) < 0.5, rng.choice(extremes, like.shape), ordinary))


def _afresh(lost: Array, slot: Slot, fresh: Slot) -> Slot:
    chosen = lost if lost.shape == slot.value.shape else lost.any()
    return slot._replace(value=fresh.value.where(chosen, slot.value))


class _Trace(NamedTuple):
    """The state before every step, leading axis = step: integers, and the heads of the buffers."""

    values: list[dict[str, Fixed]]
    heads: list[dict[str, Any]]


def _trace(run: Run, state: State) -> _Trace:
    heads = map_state(lambda block, link, slot: slot.digits.head if isinstance(slot.digits, Heads) else None, run, state)
    return _Trace(map_state(lambda block, link, slot: slot.value, run, state), heads)


def _there_and_back(run: Run, constant: Any, state: State, xs: Any) -> tuple[_Trace, _Trace, list[Array]]:
    """Both ways' traces, and per block which entries left the range of a grid on the way there: bool [block's shape]."""
    held = (state, xs)

    def forward(carry: Any, x: Any) -> Any:
        (state, lost), (t, stepped, entries, signals) = carry, x
        left = step(run, kernel_by_kernel(t, held), state, join_steps(constant, stepped), by_link(run, entries), signals)
        return (left, [a | b for a, b in zip(lost, _out_of_range(run, left), strict=True)]), _trace(run, state)

    def backward(left: State, x: Any) -> Any:
        t, stepped, entries, signals = x
        h = join_steps(constant, stepped)
        state = unstep(run, kernel_by_kernel(t, held), left, h, by_link(run, entries), lambda w: signals)
        return state, _trace(run, state)

    (end, lost), there = jax.lax.scan(forward, (state, _out_of_range(run, state)), xs)
    return there, jax.lax.scan(backward, end, xs, reverse=True)[1], lost


def _out_of_range(run: Run, state: State) -> list[Array]:
    rows = []
    for block, slots in zip(run.blocks, state, strict=True):
        row = jnp.zeros(block.shape, bool)
        for link in block.chain:
            lost = ~(jnp.abs(slots[link.name].value.decode(block.bits(link), block.dtype)) < grid_range(block.bits(link)))
            row |= lost if lost.shape == row.shape else lost.any()
        rows.append(row)
    return rows


def _compare(run: Run, there: _Trace, back: _Trace) -> None:
    for t in reversed(range(len(jax.tree.leaves(there.values)[0]))):
        for j, own in enumerate(there.values):
            for name, value in own.items():
                pairs = zip(jax.tree.leaves(value), jax.tree.leaves(back.values[j][name]), strict=True)
                if off := max(int(np.abs(x[t].astype(np.int64) - y[t]).max(initial=0)) for x, y in pairs):
                    raise AssertionError(
                        f"unstep did not undo step {t}: link `{name}`, block {j}, is off by up to {off} quanta. Its "
                        "increment is not the same function of the same values in both directions: does it read anything "
                        "but h, z and g?"
                    )
                heads = there.heads[j][name], back.heads[j][name]
                if heads[0] is not None and (heads[0][t] != heads[1][t]).any():
                    raise AssertionError(f"unstep did not undo step {t}: the buffer of link `{name}`, block {j}, differs.")
