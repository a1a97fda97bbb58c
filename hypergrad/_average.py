"""Means over the seeds of an evaluation, which no seed that went wrong can spoil.

Invariant: seeds whose value or hypergradient is not finite do not count; and none counts for more than `MOST` median norms.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array


# A seed whose hypergradient is longer than so many medians is weighed down. Norms of sound seeds differ by factors of 2 or
# so, those of seeds in chaos by thousands.
MOST = 3.0


class Evaluated(NamedTuple):
    """f and df/dh at one point, means over seeds."""

    value: Array
    grads: Any  # like the learned hypers
    monitor: Array  # of `monitor_fn`, NaN if there is none
    value_error: Array  # standard errors of both means: sample deviation / sqrt(seeds), NaN for one seed
    gradient_error: Array  # the norm of it, over all hypers
    values: Array  # [seeds]
    ok: Array  # bool [seeds]: value and hypergradient are finite, and none of a run that failed
    clipped: Array  # int32 []: how many hypergradients were weighed down


@functools.partial(jax.jit, static_argnums=(1, 2))
def averaged(groups: list[Any], seeds: int, robust: bool, failed: Any) -> Evaluated:
    """Means over the finite ones of the first `seeds` of `groups`, in order.

    failed: whether a run has said so. Where all is finite even so, as `val_fn` does not see NaN, no seed counts.
    robust: hypergradients are weighed by min(1, (MOST median / norm)^2). So one that is too long counts for MOST medians at
    most, and for the less the longer it is: by then it tells nothing of where to go.
    """
    (values, monitors), grads = jax.tree.map(lambda *x: jnp.concatenate(x)[:seeds], *groups)
    finite = [jnp.isfinite(g).reshape(seeds, -1).all(axis=1) for g in jax.tree.leaves(grads)]
    ok = jnp.stack([jnp.isfinite(values), *finite]).all(axis=0)
    ok = ok & ~(ok.all() & jnp.asarray(failed))
    if seeds == 1:
        nan = jnp.full_like(values[0], jnp.nan)
        value, monitor = (jnp.where(ok[0], x[0], jnp.nan).astype(x.dtype) for x in (values, monitors))
        grads = jax.tree.map(lambda g: g[0], grads)  # as they are, for an error to show
        return Evaluated(value, grads, monitor, nan, nan, values, ok, jnp.int32(0))
    even = ok.astype(wide(values))
    weights = _weights(grads, ok).astype(even.dtype) if robust else even
    value, monitor = (mean(x, even) for x in (values, monitors))
    error = norm(jax.tree.map(lambda g: _standard_error(g, weights), grads))
    grads = jax.tree.map(lambda g: mean(g, weights), grads)
    return Evaluated(
        value,
        grads,
        monitor,
        _standard_error(values, even).astype(values.dtype),
        error,
        values,
        ok,
        jnp.sum(weights < even, dtype=jnp.int32),
    )


def _weights(grads: Any, ok: Array) -> Array:
    """[seeds], 0 where not ok. Without a median to compare with (0: most do not depend on anything) all count the same."""
    norms = jax.vmap(norm)(grads)
    most = MOST * jnp.nanmedian(jnp.where(ok, norms, jnp.nan))
    too_long = (norms > most) & (most > 0)
    return jnp.where(ok, jnp.where(too_long, jnp.square(most / norms), 1), 0)


def norm(tree: Any) -> Array:
    """Of a tree, without the square of anything large or small: of a hypergradient that explodes it would overflow."""
    leaves = [x for x in jax.tree.leaves(widened(tree)) if x.size]
    if not leaves:
        return jnp.zeros(())
    largest = jnp.stack([jnp.max(jnp.abs(x)) for x in leaves]).max()
    unit = _unit(largest)
    return unit * optax.tree.norm([x / unit for x in leaves])


def mean(x: Array, weights: Array) -> Array:
    """Over what has a weight, NaN where nothing has."""
    return _wide_mean(x, weights).astype(x.dtype)


def _wide_mean(x: Array, weights: Array) -> Array:
    w = _along(weights, x)
    return jnp.sum(w * x, axis=0, where=w > 0) / jnp.sum(weights).astype(w.dtype)


def _standard_error(x: Array, weights: Array) -> Array:
    """Sample deviation / sqrt(n) of the mean of the n that have a weight; NaN where n < 2. In float32 at least."""
    w, n = _along(weights, x), jnp.sum(weights > 0)
    off = jnp.where(w > 0, w * (x - _wide_mean(x, weights)), 0)
    unit = _unit(jnp.max(jnp.abs(off), axis=0))
    squares = jnp.sum(jnp.square(off / unit), axis=0)
    error = unit * (jnp.sqrt(squares * n / jnp.maximum(n - 1, 1)) / jnp.sum(weights))
    return jnp.where(n > 1, error, jnp.nan).astype(w.dtype)


def _unit(largest: Array) -> Array:
    """To count in where squares are taken, which neither overflow then nor vanish."""
    return jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)


def _along(weights: Array, x: Array) -> Array:
    return weights.reshape(-1, *(1,) * (x.ndim - 1)).astype(wide(x))


def widened(tree: Any) -> Any:
    """In float32 at least: a norm or product of what has 16 bits may overflow."""
    return jax.tree.map(lambda x: x.astype(wide(x)), tree)


def wide(x: Array) -> Any:
    """What sums are computed in: that of numbers of 16 bits may overflow where their mean does not."""
    return np.promote_types(x.dtype, np.float32)
