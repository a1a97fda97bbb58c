"""Optimizers that the library does not ship, written against `Link` and `Optimizer` alone.

Shampoo shows that links may have another shape than the parameters, and increments that mix a leaf's entries; Change that
an increment may read the old value of a link after it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from hypergrad.optimizers.chain import Link, Optimizer


def _safe_sqrt(x: jax.Array) -> jax.Array:
    """sqrt(max(x, 0)) whose derivative at zero is zero, not infinite."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


@jax.custom_jvp
def inverse_fourth_root(a: jax.Array) -> jax.Array:
    """A^(-1/4) of a symmetric matrix, its eigenvalues taken as 1e-3 where they are less: float [n, n]."""
    values, vectors = _positive_eigh(a)
    return (vectors * values**-0.25) @ vectors.T


@inverse_fourth_root.defjvp
def _inverse_fourth_root_jvp(primals: Any, tangents: Any) -> Any:
    # Daleckii-Krein: divided differences of x^(-1/4), with a = x^(1/4) and so without cancellation where two values meet.
    values, vectors = _positive_eigh(primals[0])
    a, b = values[:, None] ** 0.25, values[None, :] ** 0.25
    differences = -1 / (a * b * (a + b) * (a * a + b * b))
    inner = vectors.T @ tangents[0] @ vectors
    return (vectors * values**-0.25) @ vectors.T, vectors @ (differences * inner) @ vectors.T


def _positive_eigh(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, vectors = jnp.linalg.eigh(a)
    return jnp.maximum(values, 1e-3), vectors


def _start(axis: int) -> Any:
    """0.1 times the identity of an axis of a matrix; zeros for other leaves, whose statistic is elementwise."""
    return lambda leaf: 0.1 * jnp.eye(leaf.shape[axis], dtype=leaf.dtype) if leaf.ndim == 2 else jnp.zeros_like(leaf)


def _outer(g: jax.Array) -> jax.Array:
    """g g^T of a matrix, g^2 of other leaves. Not `g @ g.T`: XLA:CPU lays small products out anew in each program, and
    their bits with them."""
    return jnp.sum(g[:, None] * g[None], axis=2) if g.ndim == 2 else g * g


def _preconditioned(z: Any, g: jax.Array) -> jax.Array:
    if g.ndim != 2:
        return g / (_safe_sqrt(z.left) + 0.1)
    return inverse_fourth_root(z.left) @ g @ inverse_fourth_root(z.right)


class Shampoo(Optimizer):
    """L <- b L + g g^T;  R <- b R + g^T g;  v <- m v - L^(-1/4) g R^(-1/4);  w <- w + lr v."""

    learning_rate: Any
    momentum: Any = 0.9
    b: Any = 0.95

    chain = (
        Link("left", lambda h, z, g: _outer(g), decay="b", start=_start(0)),
        Link("right", lambda h, z, g: _outer(g.T), decay="b", start=_start(1)),
        Link("velocity", lambda h, z, g: -_preconditioned(z, g), decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


class Change(Optimizer):
    """m <- b m + (1 - b) (g - p);  p <- c p + (1 - c) g;  w <- w - a m: the old value of a later link is read."""

    learning_rate: Any
    b: Any = 0.9
    c: Any = 2.0**-2

    chain = (
        Link("change", lambda h, z, g: (1 - h.b) * (g - z.previous), decay="b"),
        Link("previous", lambda h, z, g: (1 - h.c) * g, decay="c", bits_a_step=2),
        Link("params", lambda h, z: -h.learning_rate * z.change),
    )
