"""Rules of matrices that optax does not have, written plainly from their papers, as optax transformations of matrices.

Each takes a rate, and decays as they are. `beside_adamw` gives all else to optax's AdamW.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from experiments.benchmarks import plain_shampoo


Update = Callable[[Array, Any, Array, Array], tuple[Array, Any]]  # (g, state, w, t) -> (what is added to w, state)


class Counted(NamedTuple):
    step: Array
    leaves: list[Any]


def matrixwise(start: Callable[[Array], Any], update: Update) -> optax.GradientTransformation:
    def init(params: Any) -> Counted:
        return Counted(jnp.zeros((), jnp.int32), [start(w) for w in jax.tree.leaves(params)])

    def step(updates: Any, state: Any, params: Any = None) -> tuple[Any, Counted]:
        g, tree = jax.tree.flatten(updates)
        moved = [update(*of_leaf, state.step) for of_leaf in zip(g, state.leaves, jax.tree.leaves(params), strict=True)]
        added, leaves = zip(*moved, strict=True)
        return tree.unflatten(added), Counted(state.step + 1, list(leaves))

    return optax.GradientTransformation(init, step)


def beside_adamw(rule: optax.GradientTransformation, rate: float, b1: float, b2: float) -> optax.GradientTransformation:
    labels = lambda w: jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "rest", w)  # noqa: E731
    return optax.multi_transform({"matrix": rule, "rest": optax.adamw(rate, b1, b2, weight_decay=0.0)}, labels)


def shampoo(rate: float, momentum: float, b2: float) -> optax.GradientTransformation:
    """Anil et al. (2020): every = 10, blocks of 128, Adam's size of a step."""

    def update(g: Array, state: Any, w: Array, t: Array) -> tuple[Array, Any]:
        decays = plain_shampoo.Decays(momentum, b2)
        return plain_shampoo.matrix(jnp.zeros_like(w), state, g, jnp.asarray(rate, w.dtype), t, decays)

    return matrixwise(plain_shampoo.start_matrix, update)


def soap(rate: float, b1: float, b2: float, factor_decay: float, every: int = 10) -> optax.GradientTransformation:
    """Vyas et al. (2024), the basis from eigenvectors at steps 1, 1 + every, .."""

    def start(w: Array) -> Any:
        m, n = (jnp.eye(side, dtype=w.dtype) for side in w.shape)
        return 0 * m, 0 * n, m, n, jnp.zeros_like(w), jnp.zeros_like(w)

    def update(g: Array, state: Any, w: Array, t: Array) -> tuple[Array, Any]:
        left, right, p, q, m, s = state
        left = factor_decay * left + (1 - factor_decay) * g @ g.T
        right = factor_decay * right + (1 - factor_decay) * g.T @ g
        due = (t >= 1) & ((t - 1) % every == 0)
        p, q = jax.lax.cond(due, lambda: (jnp.linalg.eigh(left)[1], jnp.linalg.eigh(right)[1]), lambda: (p, q))
        m = b1 * m + (1 - b1) * g
        s = b2 * s + (1 - b2) * (p.T @ g @ q) ** 2
        turned = (p.T @ m @ q) / (1 - b1 ** (t + 1.0)) / (jnp.sqrt(s / (1 - b2 ** (t + 1.0))) + 1e-8)
        return -rate * p @ turned @ q.T, (left, right, p, q, m, s)

    return matrixwise(start, update)


def nesterov_muon(rate: float, momentum: float) -> optax.GradientTransformation:
    """Jordan et al. (2024), as their code has it; optax's corrects both parts for their start."""

    def update(g: Array, m: Array, w: Array, t: Array) -> tuple[Array, Any]:
        del t
        m = momentum * m + (1 - momentum) * g
        scale = max(1, w.shape[1] / w.shape[0]) ** 0.5
        return -rate * scale * newton_schulz(momentum * m + (1 - momentum) * g), m

    return matrixwise(jnp.zeros_like, update)


def normuon(rate: float, momentum: float, b2: float) -> optax.GradientTransformation:
    """Li et al. (2025), a column being a neuron; the five steps of Jordan et al. (2024)."""

    def start(w: Array) -> Any:
        return jnp.zeros_like(w), jnp.zeros((1, w.shape[1]), w.dtype)

    def update(g: Array, state: Any, w: Array, t: Array) -> tuple[Array, Any]:
        del t
        m, v = state
        m = momentum * m + (1 - momentum) * g
        o = newton_schulz(m)
        v = b2 * v + (1 - b2) * jnp.mean(o * o, axis=0, keepdims=True)
        even = o / jnp.sqrt(v + 1e-16)
        scale = max(1, w.shape[1] / w.shape[0]) ** 0.5
        return -rate * scale * even * jnp.linalg.norm(o) / jnp.linalg.norm(even), (m, v)

    return matrixwise(start, update)


def newton_schulz(x: Array) -> Array:
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (jnp.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x
