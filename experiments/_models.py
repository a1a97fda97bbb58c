"""A tanh network as a plain pytree: {"layer_1": {"weights": ..., "biases": ...}, ...}."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


Params = dict[str, dict[str, Array]]


def init_mlp(key: Array, sizes: tuple[int, ...], scale: Any) -> Params:
    """Normal draws times `scale`, a pytree {layer: {kind: scalar}} or one scalar."""
    # Drawn flat: of a matrix of ten columns XLA:CPU unrolls every row, a third of all code of some experiments.
    names = [f"layer_{i + 1}" for i in range(len(sizes) - 1)]
    keys = jax.random.split(key, (len(names), 2))
    unit = {
        name: {"weights": jax.random.normal(k[0], (m * n,)).reshape(m, n), "biases": jax.random.normal(k[1], (n,))}
        for name, k, m, n in zip(names, keys, sizes[:-1], sizes[1:], strict=True)
    }
    scale = jax.tree.broadcast(scale, unit)
    return jax.tree.map(lambda s, w: s * w, scale, unit)


def apply_mlp(params: Params, x: Array) -> Array:
    """Logits [examples, classes]."""
    *hidden, last = params.values()
    for layer in hidden:
        x = jnp.tanh(x @ layer["weights"] + layer["biases"])
    return x @ last["weights"] + last["biases"]


def cross_entropy(params: Params, x: Array, y: Array) -> Array:
    """Mean negative log-likelihood in nats."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(apply_mlp(params, x)), y[:, None], axis=1))


def error_rate(params: Params, x: Array, y: Array) -> Array:
    return jnp.mean(jnp.argmax(apply_mlp(params, x), axis=1) != y)
