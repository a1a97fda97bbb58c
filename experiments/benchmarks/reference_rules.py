"""Rules that optax does not have, written plainly from their papers, as optax transformations.

Those of matrices take a rate, and decays as they are; `beside_adamw` gives all else to optax's AdamW. Those of curvature
take the loss and the quantity besides, and are told `batch` and `key` at each update.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import hypergrad as hg
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


class Averaged(NamedTuple):
    step: Array
    curvature: Any
    velocity: Any


Loss = Callable[[Any, Any, Any], Array]


def diagonal(
    loss: Loss, quantity: str, rate: float, damping: float, momentum: float, decay: float
) -> optax.GradientTransformationExtraArgs:
    """Equation 4 of Dangel et al. (2020) with a diagonal, which is averaged over steps."""
    divided = lambda g, c, weight: g / (c + damping)  # noqa: E731
    return _curved(loss, quantity, rate, momentum, decay, lambda w: w, divided)


def kronecker(
    loss: Loss, quantity: str, rate: float, damping: float, momentum: float, decay: float
) -> optax.GradientTransformationExtraArgs:
    """Equation 4 of Dangel et al. (2020) with factors, averages of Martens and Grosse (2015); of dense layers."""

    def start(w: Array) -> Any:
        a = None if w.ndim == 1 else jnp.zeros((1, w.shape[0], w.shape[0]), w.dtype)
        return hg.curvature.Kronecker(a, jnp.zeros((1, w.shape[-1], w.shape[-1]), w.dtype))

    def divided(g: Array, block: hg.curvature.Kronecker, weight: Array) -> Array:
        b = block.b[0] / weight
        if block.a is None:
            return jnp.linalg.solve(b + damping * jnp.eye(len(b), dtype=g.dtype), g)
        a = block.a[0] / weight
        pi, s = jnp.sqrt(jnp.mean(jnp.diag(a)) / jnp.mean(jnp.diag(b))), damping**0.5
        left = jnp.linalg.solve(a + pi * s * jnp.eye(len(a), dtype=g.dtype), g)
        return jnp.linalg.solve(b + s / pi * jnp.eye(len(b), dtype=g.dtype), left.T).T

    return _curved(loss, quantity, rate, momentum, decay, start, divided)


def _curved(
    loss: Loss, quantity: str, rate: float, momentum: float, decay: float,
    start: Callable[[Array], Any], divided: Callable[[Array, Any, Array], Array],
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    def init(params: Any) -> Averaged:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Averaged(jnp.zeros((), jnp.int32), jax.tree.map(start, zeros), zeros)

    def step(updates: Any, state: Averaged, params: Any = None, *, batch: Any, key: Array) -> tuple[Any, Averaged]:
        new = hg.curvature.quantities(loss, params, None, batch, quantity, key=key)[quantity]
        curvature = jax.tree.map(lambda c, x: decay * c + (1 - decay) * x, state.curvature, new)
        weight = 1 - decay ** (state.step + 1.0)
        divide = lambda g, c: divided(g, c, weight.astype(g.dtype))  # noqa: E731
        steps = jax.tree.map(divide, updates, curvature)  # of each leaf of the gradient, what stands there in `curvature`
        velocity = jax.tree.map(lambda v, s: momentum * v - (1 - momentum) * s, state.velocity, steps)
        return jax.tree.map(lambda v: rate * v, velocity), Averaged(state.step + 1, curvature, velocity)

    return optax.GradientTransformationExtraArgs(init, step)
