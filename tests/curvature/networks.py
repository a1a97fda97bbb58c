"""Small networks of all kinds of layers, in float64, and every quantity by brute force."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree


N = 5  # examples


class Network(NamedTuple):
    model: Callable[[Any, Any], Any]  # (params, batch) -> outputs, the examples their leading axis
    end: Callable[[Any, Any], Any]  # (outputs, batch) -> loss
    params: Any
    batch: Any
    penalty: float = 0.0

    def loss(self, params: Any, theta: Any, batch: Any) -> Any:
        cubes = sum(jnp.sum(x**3) for x in jax.tree.leaves(params)) if self.penalty else 0.0
        return self.end(self.model(params, batch), batch) + self.penalty * cubes


def cross_entropy(f: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(f, batch["y"]).mean()


def squared(f: Any, batch: Any) -> Any:
    return jnp.mean((f - jax.nn.one_hot(batch["y"], f.shape[-1])) ** 2)


def normal(rng: Any, *shape: int) -> Any:
    return jnp.asarray(0.5 * rng.normal(size=shape))


def labels(rng: Any, classes: int, *shape: int) -> Any:
    return jnp.asarray(rng.integers(0, classes, shape))


def dense(end: Any = cross_entropy, penalty: float = 0.0) -> Network:
    rng = np.random.default_rng(0)
    params = {"w": normal(rng, 4, 6), "b": normal(rng, 6), "v": normal(rng, 3, 6), "c": normal(rng, 3)}
    model = lambda p, b: jnp.tanh(b["x"] @ p["w"] + p["b"]) @ p["v"].T + p["c"]  # noqa: E731
    return Network(model, end, params, {"x": normal(rng, N, 4), "y": labels(rng, 3, N)}, penalty)


def convolution() -> Network:
    rng = np.random.default_rng(1)
    params = {"k": normal(rng, 3, 3, 2, 4), "b": normal(rng, 4), "g": normal(rng, 2, 2, 2, 6), "v": normal(rng, 18, 3)}

    def model(p: Any, b: Any) -> Any:
        names = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(b["x"], p["k"], (1, 2), "SAME", dimension_numbers=names) + p["b"]
        x = jax.nn.sigmoid(x)
        x = jax.lax.conv_general_dilated(
            x, p["g"], (1, 2), "VALID", rhs_dilation=(1, 2), dimension_numbers=names, feature_group_count=2
        )
        return jax.nn.relu(x).reshape(len(x), -1) @ p["v"]

    return Network(model, cross_entropy, params, {"x": normal(rng, N, 4, 6, 2), "y": labels(rng, 3, N)})


def attention() -> Network:
    """Embedding, positions, normalization, a weight that is used twice, labels at every position."""
    rng = np.random.default_rng(2)
    params = {name: normal(rng, 4, 4) for name in "qkv"} | {
        "table": normal(rng, 7, 4), "places": normal(rng, 5, 4), "scale": 1 + normal(rng, 4), "shift": normal(rng, 4),
    }  # fmt: skip

    def model(p: Any, b: Any) -> Any:
        x = p["table"][b["x"]] + p["places"]
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3) * p["scale"] + p["shift"]
        scores = jnp.einsum("btd,bsd->bts", x @ p["q"], x @ p["k"]) / 2
        x = x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), jax.checkpoint(lambda x: x @ p["v"])(x))
        return x @ p["table"].T

    return Network(model, cross_entropy, params, {"x": labels(rng, 7, N, 5), "y": labels(rng, 7, N, 5)})


def recurrent() -> Network:
    rng = np.random.default_rng(3)
    params = {"w": normal(rng, 3, 4), "u": normal(rng, 4, 4), "b": normal(rng, 4), "v": normal(rng, 4, 2)}

    def model(p: Any, b: Any) -> Any:
        step = lambda h, x: (jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"]), None)  # noqa: E731
        h = jnp.zeros((len(b["x"]), 4))
        return jax.lax.scan(step, h, jnp.moveaxis(b["x"], 1, 0))[0] @ p["v"]

    return Network(model, cross_entropy, params, {"x": normal(rng, N, 3, 3), "y": labels(rng, 2, N)})


def unusual() -> Network:
    """Weights that are no layer's: normalized, multiplied with each other; and a layer under `vmap` over examples."""
    rng = np.random.default_rng(4)
    params = {"w": normal(rng, 4, 3), "u": normal(rng, 3, 3), "v": normal(rng, 3, 3), "s": normal(rng)}

    def model(p: Any, b: Any) -> Any:
        w = p["w"] / jnp.sqrt(jnp.sum(p["w"] ** 2, 0))
        return jax.vmap(lambda x: (p["u"] @ p["v"]) @ jnp.tanh(x @ w) * p["s"])(b["x"])

    return Network(model, cross_entropy, params, {"x": normal(rng, N, 4), "y": labels(rng, 3, N)})


NETWORKS = {
    "dense": dense, "squared error": lambda: dense(squared), "penalty": lambda: dense(penalty=0.1),
    "convolution": convolution, "attention": attention, "recurrent": recurrent, "unusual": unusual,
}  # fmt: skip


def singles(batch: Any) -> Any:
    """Batches of one example each."""
    return jax.tree.map(lambda x: x[:, None], batch)


def gradients(net: Network) -> Any:
    """grad l_n, stacked."""
    return jax.jit(jax.vmap(lambda b: jax.grad(net.loss)(net.params, None, b)))(singles(net.batch))


def ggn(net: Network) -> Any:
    """The whole matrix, in the order of `ravel_pytree`."""
    flat, tree = ravel_pytree(net.params)

    def one(b: Any) -> Any:
        outputs = net.model(net.params, b)
        j = jax.jacrev(lambda w: net.model(tree(w), b).reshape(-1))(flat)
        h = jax.hessian(lambda f: net.end(f.reshape(outputs.shape), b))(outputs.reshape(-1))
        return j.T @ h @ j

    return jnp.mean(jax.jit(jax.vmap(one))(singles(net.batch)), 0)


def hessian(net: Network) -> Any:
    flat, tree = ravel_pytree(net.params)
    return jax.jit(jax.hessian(lambda w: net.loss(tree(w), None, net.batch)))(flat)


def diagonal(net: Network, matrix: Any) -> Any:
    return ravel_pytree(net.params)[1](jnp.diag(matrix))
