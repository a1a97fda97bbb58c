"""Optimizers that the library does not ship, written against `Link` and `Optimizer` alone.

They show that the chain carries adaptive rules: two statistics and a correction prepared per step (Adam), a decaying
`params` link (AdamW), three links in a row (RMSProp), statistics of another shape than the parameters (Shampoo).
"""

from typing import Any

import jax
import jax.numpy as jnp

from hypergrad.optimizers.chain import Link, Optimizer


def _safe_sqrt(x: jax.Array) -> jax.Array:
    """sqrt(max(x, 0)) whose derivative at zero is zero, not infinite."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def _bias_correction(b: jax.Array, steps: int) -> jax.Array:
    """1 - b_1 ... b_t at step t: by what a decaying mean that starts at zero falls short. [steps | 1, ..] -> [steps, ..]"""
    return 1 - jnp.cumprod(jnp.broadcast_to(b, (steps, *b.shape[1:])), axis=0)


_FIRST = Link("mean", lambda h, z, g: (1 - h.b1) * g, decay="b1")
_SECOND = Link("square", lambda h, z, g: (1 - h.b2) * (g * g), decay="b2", extra_bits=8)


def _adam_step(h: Any, z: Any) -> jax.Array:
    root = _safe_sqrt(z.square / h.correct2)
    return -h.learning_rate * (z.mean / h.correct1) / (root + h.eps)


class Adam(Optimizer):
    """m <- b1 m + (1-b1) g;  s <- b2 s + (1-b2) g^2;  w <- w - lr (m / c1) / (sqrt(s / c2) + eps)."""

    learning_rate: Any
    b1: Any = 0.9
    b2: Any = 0.99
    eps: Any = 1e-3

    chain = (_FIRST, _SECOND, Link("params", _adam_step))

    def prepare(self, h: dict[str, jax.Array], steps: int) -> dict[str, jax.Array]:
        return {**h, "correct1": _bias_correction(h["b1"], steps), "correct2": _bias_correction(h["b2"], steps)}


class AdamW(Adam):
    """Adam with w <- (1 - lr wd) w + ...: the parameters themselves decay."""

    weight_decay: Any = 1e-2

    chain = (_FIRST, _SECOND, Link("params", _adam_step, decay="keep", denominator=2**24, may_be_one=True))

    def prepare(self, h: dict[str, jax.Array], steps: int) -> dict[str, jax.Array]:
        return {**super().prepare(h, steps), "keep": 1 - h["learning_rate"] * h["weight_decay"]}


class RMSProp(Optimizer):
    """s <- b s + (1-b) g^2;  v <- m v - g / (sqrt(s) + eps);  w <- w + lr v."""

    learning_rate: Any
    momentum: Any = 0.9
    b: Any = 0.95
    eps: Any = 1e-2

    chain = (
        Link("square", lambda h, z, g: (1 - h.b) * (g * g), decay="b", extra_bits=8),
        Link("velocity", lambda h, z, g: -g / (_safe_sqrt(z.square) + h.eps), decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


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
