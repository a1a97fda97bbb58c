"""Small problems with fixed data: one network of each kind whose gradients must be the same in both directions.

Everything is drawn once with NumPy, so that float32 and float64 runs start from the same numbers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import hypergrad as hg


EXAMPLES, FEATURES, CLASSES = 24, 6, 3
TOKENS, WIDTH, VOCABULARY, SIDE = 4, 6, 7, 6


class Network(NamedTuple):
    """A classifier and its data."""

    loss: Callable[[Any, Any, Any], jax.Array]  # (params, theta, batch): cross entropy + sum of theta w^2
    apply: Callable[[Any, Any], jax.Array]  # (params, x) -> logits
    weights: dict[str, np.ndarray]
    data: tuple[np.ndarray, np.ndarray]

    def params(self, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        return {k: jnp.asarray(w, dtype) for k, w in self.weights.items()}

    def theta(self, dtype: Any = jnp.float32, value: float = 1e-2) -> dict[str, jax.Array]:
        """One L2 penalty per weight."""
        return {k: jnp.full(w.shape, value, dtype) for k, w in self.weights.items()}

    def batches(self, steps: int, batch_size: int = 8) -> Callable[[jax.Array], Any]:
        """Rows drawn beforehand: no shuffling inside the loop, which takes long to compile."""
        rows = np.random.default_rng(1).integers(0, EXAMPLES, (steps, batch_size))
        return hg.stacked(jax.tree.map(lambda x: x[rows], self.data))

    def drawn(self, key: jax.Array, steps: int, batch_size: int = 8) -> Callable[[jax.Array], Any]:
        """The same from a key, which may be traced."""
        rows = jax.random.randint(key, (steps, batch_size), 0, EXAMPLES, jnp.int32)
        return hg.stacked(jax.tree.map(lambda x: jnp.asarray(x)[rows], self.data))

    def value(self, params: Any) -> jax.Array:
        """Cross entropy on all the data: a validation loss."""
        return cross_entropy(self.apply(params, self.data[0]), self.data[1])


def cross_entropy(logits: jax.Array, labels: Any) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(labels)[:, None], axis=1)
    return -jnp.mean(chosen)


def penalty(theta: Any, params: Any) -> jax.Array:
    terms = jax.tree.map(lambda t, w: jnp.sum(t * w * w), theta, params)
    return sum(jax.tree.leaves(terms))


@functools.cache
def network(name: str = "tanh") -> Network:
    """One of `NETWORKS`; the same object at every call, so that nothing compiles twice."""
    apply, shapes, inputs = NETWORKS[name]
    rng = np.random.default_rng(0)
    weights = {k: rng.normal(size=s) / np.sqrt(np.prod(s[:-1]) or 1) for k, s in shapes.items()}
    weights = {k: np.ones_like(w) if k == "scale" else w for k, w in weights.items()}
    data = (inputs(rng), rng.integers(0, CLASSES, EXAMPLES).astype(np.int32))

    def loss(params: Any, theta: Any, batch: Any) -> jax.Array:
        x, y = batch
        return cross_entropy(apply(params, x), y) + penalty(theta, params)

    return Network(loss, apply, weights, data)


def _dense(activation: Callable[[jax.Array], jax.Array], p: Any, x: Any) -> jax.Array:
    return activation(x.astype(p["w1"].dtype) @ p["w1"]) @ p["w2"]


def _biased(activation: Callable[[jax.Array], jax.Array], p: Any, x: Any) -> jax.Array:
    return activation(x.astype(p["w1"].dtype) @ p["w1"] + p["b1"]) @ p["w2"]


def _layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + 1e-5) * scale + shift


def _normed(activation: Callable[[jax.Array], jax.Array], p: Any, x: Any) -> jax.Array:
    return activation(_layer_norm(x.astype(p["w1"].dtype) @ p["w1"], p["scale"], p["shift"])) @ p["w2"]


def _attention(p: Any, x: Any) -> jax.Array:
    x = x.astype(p["qkv"].dtype)
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
    mixed = jax.nn.softmax(jnp.einsum("nia,nja->nij", q, k) / WIDTH**0.5) @ v
    return jnp.mean(x + mixed, axis=1) @ p["out"]


def _convolution(p: Any, x: Any) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    x = x.astype(p["kernel"].dtype)
    maps = jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=layout)
    return jnp.mean(jax.nn.relu(maps + p["bias"]), axis=(1, 2)) @ p["out"]


def _embedding(p: Any, x: Any) -> jax.Array:
    return jnp.tanh(jnp.mean(p["table"][x], axis=1)) @ p["out"]


def _normal(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.normal(size=(EXAMPLES, *shape)).astype(np.float32)


def _words(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, VOCABULARY, (EXAMPLES, TOKENS)).astype(np.int32)


_MATRICES = {"w1": (FEATURES, 5), "w2": (5, CLASSES)}
_NORMED = {**_MATRICES, "scale": (5,), "shift": (5,)}

NETWORKS: dict[str, tuple[Any, dict[str, tuple[int, ...]], Any]] = {
    "tanh": (functools.partial(_dense, jnp.tanh), _MATRICES, _normal(FEATURES)),
    "relu": (functools.partial(_biased, jax.nn.relu), {**_MATRICES, "b1": (5,)}, _normal(FEATURES)),
    "gelu": (functools.partial(_dense, jax.nn.gelu), _MATRICES, _normal(FEATURES)),
    "layer norm": (functools.partial(_normed, jax.nn.gelu), _NORMED, _normal(FEATURES)),
    "attention": (_attention, {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, CLASSES)}, _normal(TOKENS, WIDTH)),
    "convolution": (
        _convolution,
        {"kernel": (3, 3, 1, 4), "bias": (4,), "out": (4, CLASSES)},
        _normal(SIDE, SIDE, 1),
    ),
    "embedding": (_embedding, {"table": (VOCABULARY, 5), "out": (5, CLASSES)}, _words),
}
