"""Shampoo written plainly, in floats: whole matrices, roots by `jnp.linalg.eigh` at every tenth step, Adam's size of a step.

The opponent of `hg.Shampoo(every=10, graft="adam")` on matrices, beside Adam on all else.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


EVERY, BLOCK, B1, EPS, RIDGE, GRAFT_EPS = 10, 128, 0.9, 1e-8, 1e-6, 1e-10


class Decays(NamedTuple):
    momentum: float = 0.9
    b2: float = 0.999


DECAYS = Decays()


class Matrix(NamedTuple):
    """Of one matrix."""

    factors: list[tuple[Array, Array]]  # of each row of blocks and each column of blocks: L, R
    roots: list[tuple[Array, Array]]
    square: Array
    velocity: Array


class Rest(NamedTuple):
    mean: Array
    square: Array


def start(params: Any) -> Any:
    rest = lambda w: Rest(jnp.zeros_like(w), jnp.zeros_like(w))  # noqa: E731
    return jax.tree.map(lambda w: start_matrix(w) if w.ndim == 2 else rest(w), params)


def start_matrix(w: Array) -> Matrix:
    blocks = [w[at] for at in _places(w)]
    zeros = [(jnp.zeros((m, m), w.dtype), jnp.zeros((n, n), w.dtype)) for m, n in (b.shape for b in blocks)]
    return Matrix(zeros, zeros, jnp.zeros_like(w), jnp.zeros_like(w))


def update(params: Any, state: Any, g: Any, rate: Array, t: Array) -> tuple[Any, Any]:
    leaves, tree = jax.tree.flatten(params)
    states = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, (Matrix, Rest)))
    moved = [
        (matrix if isinstance(s, Matrix) else _rest)(w, s, g, rate, t)
        for w, s, g in zip(leaves, states, jax.tree.leaves(g), strict=True)
    ]
    return tuple(tree.unflatten(x) for x in zip(*moved, strict=True))  # type: ignore[return-value]


def _rest(w: Array, state: Rest, g: Array, rate: Array, t: Array) -> tuple[Array, Rest]:
    m, s = B1 * state.mean + (1 - B1) * g, DECAYS.b2 * state.square + (1 - DECAYS.b2) * g * g
    c1, c2 = 1 - B1 ** (t + 1.0), 1 - DECAYS.b2 ** (t + 1.0)
    root = jnp.where(s > 0, jnp.sqrt(jnp.where(s > 0, s / c2, 1)), 0)
    return w - rate * (m / c1) / (root + EPS), Rest(m, s)


def matrix(w: Array, state: Matrix, g: Array, rate: Array, t: Array, decays: Decays = DECAYS) -> tuple[Array, Matrix]:
    b2 = decays.b2
    unbias = 1 / (1 - b2 ** (t + 1.0))
    places = _places(w)
    factors = [
        (b2 * left + (1 - b2) * g[at] @ g[at].T, b2 * right + (1 - b2) * g[at].T @ g[at])
        for at, (left, right) in zip(places, state.factors, strict=True)
    ]
    due = lambda: [(_root(left * unbias), _root(right * unbias)) for left, right in factors]  # noqa: E731
    roots = jax.lax.cond(t % EVERY == 0, due, lambda: state.roots)
    square = b2 * state.square + (1 - b2) * g * g
    step = jnp.zeros_like(g)
    for at, (left, right) in zip(places, roots, strict=True):
        step = step.at[at].set(left @ g[at] @ right)
    grafted = g * jax.lax.rsqrt(square * unbias + GRAFT_EPS)
    step = step * (_norm(grafted) / _norm(step))
    velocity = decays.momentum * state.velocity - (1 - decays.momentum) * step
    return w + rate * velocity, Matrix(factors, roots, square, velocity)


def _root(a: Array) -> Array:
    """(A + ridge)^(-1/4)"""
    n = len(a)
    w, q = jnp.linalg.eigh(a + (RIDGE * jnp.trace(a) / n + GRAFT_EPS) * jnp.eye(n, dtype=a.dtype))
    return (q * jnp.maximum(w, GRAFT_EPS) ** -0.25) @ q.T


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(x * x) + jnp.finfo(x.dtype).tiny)


def _places(w: Array) -> list[tuple[slice, slice]]:
    cut = lambda n: [slice(i, min(i + BLOCK, n)) for i in range(0, n, BLOCK)]  # noqa: E731
    return [(rows, columns) for rows in cut(w.shape[0]) for columns in cut(w.shape[1])]
