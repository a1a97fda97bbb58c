"""How near a step is to the rate beyond which momentum diverges: what `hg.diagnose(curvature=True)` measures along a run.

Invariant: it is a metric of the run like any other, so that training keeps its bits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers import SGD, HeavyBall
from hypergrad.optimizers.chain import Optimizer
from hypergrad.optimizers.expand import broadcast_prefix


ROUNDS = 15  # of each of two power iterations


def excess_of(loss: Callable[..., Any], optimizer: Optimizer, pair: bool) -> Callable[..., Array] | None:
    """A metric: the learning rate over 2 (1 + m) / lambda, lambda the largest eigenvalue of the batch's Hessian.

    Heavy ball diverges along lambda's direction where that is above 1. Where rates differ from weight to weight, the largest
    eigenvalue of D^(1/2) H D^(1/2) with D = a / (2 (1 + m)). By power iteration, so that it may be too small, and never too
    large. pair: whether the loss returns evidence for statistics, too. None: no rule whose limit is known.
    """
    if type(optimizer) not in (SGD, HeavyBall):
        return None

    def metric(params: Any, theta: Any, batch: Any, state: Any, hypers: Any) -> Array:
        value = lambda w: loss(w, theta, batch)[0] if pair else loss(w, theta, batch)  # noqa: E731
        leaves, tree = jax.tree.flatten(params)
        rates = broadcast_prefix("learning_rate", hypers.learning_rate, params)
        momenta = broadcast_prefix("momentum", hypers.momentum, params)
        share = [1 - m if type(optimizer) is SGD else jnp.ones_like(m) for m in momenta]
        d = [a * s / (2 * (1 + m)) for a, s, m in zip(rates, share, momenta, strict=True)]
        root = [jnp.broadcast_to(jnp.sqrt(jnp.maximum(x, 0)), w.shape) for x, w in zip(d, leaves, strict=True)]

        def times(v: list[Array]) -> list[Array]:
            moved = jax.tree.unflatten(tree, [r * x for r, x in zip(root, v, strict=True)])
            slope = lambda w: _dot(jax.tree.leaves(jax.grad(value)(w)), jax.tree.leaves(moved))  # noqa: E731
            return [r * x for r, x in zip(root, jax.tree.leaves(jax.grad(slope)(params)), strict=True)]

        keys = jax.random.split(jax.random.key(0), len(leaves))
        start = _unit([jax.random.normal(k, w.shape, w.dtype) for k, w in zip(keys, leaves, strict=True)])
        v = jax.lax.fori_loop(0, ROUNDS, lambda _, v: _unit(times(v)), start)
        # The largest in magnitude. Where that is negative, the spectrum is moved up by it, and all begins anew.
        lowest = jnp.minimum(_dot(v, times(v)), 0)
        v = [jnp.where(lowest < 0, x, y) for x, y in zip(start, v, strict=True)]
        moved = lambda v: [x - (lowest * y).astype(y.dtype) for x, y in zip(times(v), v, strict=True)]  # noqa: E731
        v = jax.lax.fori_loop(0, ROUNDS, lambda _, v: _unit(moved(v)), v)
        return _dot(v, times(v))

    return metric


def _dot(a: list[Array], b: list[Array]) -> Array:
    return sum((jnp.vdot(x, y).astype(jnp.float32) for x, y in zip(a, b, strict=True)), jnp.zeros((), jnp.float32))


def _unit(v: list[Array]) -> list[Array]:
    norm = jnp.sqrt(jnp.maximum(_dot(v, v), jnp.finfo(jnp.float32).tiny))
    return [(x / norm).astype(x.dtype) for x in v]
