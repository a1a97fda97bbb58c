"""The inverse law of optimizers on extreme integers: `unstep(step(state, g), g) == state`, bit for bit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._settings import own_settings
from hypergrad.exact import WORD_BITS, Buffer, Scaled, Value, Wide, grid_range
from hypergrad.loop import step as _step
from hypergrad.loop.drivers import in_kernels
from hypergrad.loop.problem import join_steps, split_steps
from hypergrad.optimizers.chain import Link, Optimizer
from hypergrad.optimizers.expand import buffers, compute_dtype, link_fraction_bits, link_numerators, prepared
from hypergrad.optimizers.layout import Layout, separate
from hypergrad.optimizers.transform import transforms


_EXTREMES = (0, -1, 1, 2**16 - 1, -(2**16), 2**60, -(2**60), 2**61 - 1, -(2**61) + 1)
_LOW_EXTREMES = (0, 1, 2**16 - 1, 2**31, 2**46 - 1)  # of the low limb of a wide link


def check_inverse(optimizer: Optimizer, params: Any = None, *, steps: int = 20, seed: int = 0) -> None:
    """Assert `unstep(step(state, g), g) == state` bit for bit, over `steps` random gradients and extreme integers.

    params: pytree of floats whose shapes the optimizer's hyperparameters fit; None: one float32 [3, 4] leaf. Weights that
    extreme integers drive out of their range start afresh. Raises AssertionError naming the step, link and leaf that did not
    come back.
    """
    params = {"w": jnp.zeros((3, 4), jnp.float32)} if params is None else params
    leaves = jax.tree.leaves(params)
    layout = separate([x.shape for x in leaves])
    h, _ = prepared(optimizer, params, steps, layout)
    rule = _rule_of(optimizer, layout, h, leaves)
    rng = np.random.default_rng(seed)
    with own_settings():
        plans = {
            k.name: [
                keep.schedule(link_numerators(k, hj, steps), k.denominator) for keep, hj in zip(rule.kept(k), h, strict=True)
            ]
            for k in rule.chain
            if k.decay
        }
        words: dict[str, int | None] = {name: max(int(s.words) for s in row) for name, row in plans.items()}
        turns = {name: [s.turns for s in row] for name, row in plans.items()}
        gradients = [jnp.asarray(rng.normal(size=(steps, *x.shape)), x.dtype) for x in leaves]
        constant, stepped = split_steps(h, steps)
        wide = [x.astype(dtype) for x, dtype in zip(leaves, rule.dtypes, strict=True)]
        fresh = _step.start(rule, {link.name: [link.start(x) for x in wide] for link in rule.chain}, words)
        state = fresh._replace(z={link.name: _drawn(rng, rule, link, fresh.z) for link in rule.chain})
        run = jax.jit(_there_and_back, static_argnums=0)
        for _ in range(5):
            there, back, lost = run(rule, constant, state, (jnp.arange(steps), stepped, turns, gradients))
            if not any(x.any() for x in lost):
                return _compare(rule, *jax.tree.map(np.asarray, (there, back)))
            state = state._replace(z={n: list(map(_afresh, lost, row, fresh.z[n])) for n, row in state.z.items()})
    raise AssertionError("values leave the range of their grids from a fresh start: take smaller hyperparameters to check.")


def _rule_of(optimizer: Optimizer, layout: Layout, h: Any, leaves: list[Array]) -> _step.Rule:
    chain = optimizer.chain
    bits = tuple(tuple(link_fraction_bits(link, x, None) for x in leaves) for link in chain)
    dtypes = tuple(compute_dtype(x) for x in leaves)
    own = tuple(np.dtype(x.dtype) for x in leaves)
    keep = buffers(chain, h)
    return _step.Rule(chain, bits, dtypes, own, keep, optimizer.linear, not optimizer.linear, layout, transforms(optimizer))


def _drawn(rng: np.random.Generator, rule: _step.Rule, link: Link, like: Any) -> list[Value]:
    """Integers for every leaf of a link: extremes, and as many of ordinary size."""

    def draw(x: Value, bits: int) -> Value:
        if isinstance(x, Scaled):  # as large at the full scale
            extremes, bits = [int(e / x.factors[0]) if abs(e) > 2**32 else e for e in _EXTREMES], bits - WORD_BITS
            return x._replace(z=draw_integers(x.z, extremes, bits))
        return draw_integers(x, _EXTREMES, bits)

    def draw_integers(x: Value, extremes: Sequence[int], bits: int) -> Value:
        ordinary = (rng.normal(size=x.shape) * 2.0**bits).astype(np.int64)
        z = jnp.asarray(np.where(rng.random(x.shape) < 0.5, rng.choice(extremes, x.shape), ordinary))
        return Wide(z, jnp.asarray(rng.choice(_LOW_EXTREMES, x.shape))) if link.wide else z

    return [draw(x, bits) for x, bits in zip(like[link.name], rule.bits(link), strict=True)]


def _afresh(lost: Array, z: Value, fresh: Value) -> Value:
    if isinstance(z, Scaled):
        return z._replace(z=_afresh(lost, z.z, fresh.z))
    chosen = lost if lost.shape == z.shape else lost.any()
    return jax.tree.map(lambda x, y: jnp.where(chosen, y, x), z, fresh)


class _Trace(NamedTuple):
    """The state before every step, leading axis = step: integers, and the heads of the buffers."""

    z: Any
    heads: Any


def _there_and_back(rule: _step.Rule, constant: Any, state: _step.Exact, xs: Any) -> tuple[_Trace, _Trace, list[Array]]:
    """Both ways' traces, and per leaf which entries left the range of a grid on the way there: bool [leaf shape]."""
    held = (state, xs)

    def trace(state: _step.Exact) -> _Trace:
        heads = {name: [b.head if isinstance(b, Buffer) else None for b in row] for name, row in state.buffers.items()}
        return _Trace(state.z, heads)

    def forward(carry: Any, x: Any) -> Any:
        (state, lost), (t, stepped, turns, g) = carry, x
        left = _step.step(rule, in_kernels(t, held), state, join_steps(constant, stepped), turns, g)
        return (left, [a | b for a, b in zip(lost, _out_of_range(rule, left), strict=True)]), trace(state)

    def backward(left: _step.Exact, x: Any) -> Any:
        t, stepped, turns, g = x
        state = _step.unstep(rule, in_kernels(t, held), left, join_steps(constant, stepped), turns, lambda w: g)
        return state, trace(state)

    (end, lost), there = jax.lax.scan(forward, (state, _out_of_range(rule, state)), xs)
    return there, jax.lax.scan(backward, end, xs, reverse=True)[1], lost


def _out_of_range(rule: _step.Rule, state: _step.Exact) -> list[Array]:
    rows = [jnp.zeros(x.shape, bool) for x in state.z[rule.chain[-1].name]]
    for link in rule.chain:
        for j, x in enumerate(rule.floats(state.z, link)):
            lost = ~(jnp.abs(x) < grid_range(rule.bits(link)[j]))
            rows[j] |= lost if lost.shape == rows[j].shape else lost.any()
    return rows


def _compare(rule: _step.Rule, there: _Trace, back: _Trace) -> None:
    for t in reversed(range(len(jax.tree.leaves(there.z)[0]))):
        for name, leaves in there.z.items():
            for j, z in enumerate(leaves):
                pairs = zip(jax.tree.leaves(z), jax.tree.leaves(back.z[name][j]), strict=True)
                if off := max(int(np.abs(x[t].astype(np.int64) - y[t]).max()) for x, y in pairs):
                    raise AssertionError(
                        f"unstep did not undo step {t}: link `{name}`, leaf {j}, is off by up to {off} quanta. Its "
                        "increment is not the same function of the same values in both directions: does it read anything "
                        "but h, z and g, or end in a product plus a sum?"
                    )
                if (
                    name in there.heads
                    and there.heads[name][j] is not None
                    and (there.heads[name][j][t] != back.heads[name][j][t]).any()
                ):
                    raise AssertionError(f"unstep did not undo step {t}: the buffer of link `{name}`, leaf {j}, differs.")
