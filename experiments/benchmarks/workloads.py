"""The training runs that are timed: a model, its data, and how long it is trained.

Invariant: a batch is a function of t alone, the examples in order and around again, so that every framework sees the same.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from experiments import _data


# Learning rates that suit, by a key of `opponents.RULES`.
RATES = {"sgd": 0.1, "adam": 1e-3, "muon": 1e-3, "shampoo": 1e-4}


def batch_of(data: tuple[Array, ...], size: int, t: Array) -> tuple[Array, ...]:
    start = (t * size) % (len(data[0]) - size + 1)
    return tuple(jax.lax.dynamic_slice_in_dim(a, start, size) for a in data)


class Task(NamedTuple):
    """A training run: everything but the way it is differentiated."""

    loss: Callable[[Any, Any], Array]  # (params, batch) -> scalar
    params: Any
    data: tuple[Array, ...]  # the examples, along leading axes of equal length
    batch_size: int
    steps: int
    held_out: int  # the examples that the trained parameters are judged on, from the end of the data
    rule: str = "sgd"  # a key of `opponents.RULES`
    learning_rate: float = 0.1

    def batch(self, t: Array) -> Any:
        return batch_of(self.data, self.batch_size, t)

    def validation(self, params: Any) -> Array:
        return self.loss(params, tuple(a[-self.held_out :] for a in self.data))

    @property
    def rates(self) -> Array:
        """The hyperparameters that all roads differentiate: one learning rate per step."""
        return jnp.full(self.steps, self.learning_rate)

    @property
    def parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.params))


def mlp_task(
    steps: int,
    sizes: tuple[int, ...] = (784, 64, 64, 10),
    batch_size: int = 100,
    examples: int = 2000,
    rule: str = "sgd",
) -> Task:
    """A tanh network on random inputs, the class being the largest of the first few, with noise."""
    keys = jax.random.split(jax.random.key(0), len(sizes) + 2)
    x = jax.random.normal(keys[0], (examples, sizes[0]))
    y = jnp.argmax(x[:, : sizes[-1]] + jax.random.normal(keys[1], (examples, sizes[-1])), axis=1)
    params = [
        {"w": jax.random.normal(k, (m, n)) / jnp.sqrt(m), "b": jnp.zeros(n)}
        for k, m, n in zip(keys[2:], sizes[:-1], sizes[1:], strict=False)
    ]

    def cross_entropy(params: Any, batch: Any) -> Array:
        x, y = batch
        for layer in params[:-1]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return _cross_entropy(x @ params[-1]["w"] + params[-1]["b"], y)

    return Task(cross_entropy, params, (x, y), batch_size, steps, examples, rule, RATES[rule])


def conv_task(steps: int, channels: tuple[int, int] = (8, 16), batch_size: int = 128, examples: int = 2048) -> Task:
    """Two 3x3 convolutions, tanh and 2x2 means after each, and a linear layer, on 28x28 images."""
    images, labels = _images(examples)
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    params = {
        "first": {"w": jax.random.normal(k1, (3, 3, 1, channels[0])) / 3, "b": jnp.zeros(channels[0])},
        "second": {
            "w": jax.random.normal(k2, (3, 3, *channels)) / (3 * math.sqrt(channels[0])),
            "b": jnp.zeros(channels[1]),
        },
        "out": {"w": jax.random.normal(k3, (49 * channels[1], 10)) / (7 * math.sqrt(channels[1])), "b": jnp.zeros(10)},
    }

    def cross_entropy(params: Any, batch: Any) -> Array:
        x, y = batch
        for layer in (params["first"], params["second"]):
            x = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            n, height, width, depth = x.shape
            x = jnp.tanh(x + layer["b"]).reshape(n, height // 2, 2, width // 2, 2, depth).mean(axis=(2, 4))
        return _cross_entropy(x.reshape(len(x), -1) @ params["out"]["w"] + params["out"]["b"], y)

    return Task(cross_entropy, params, (images, labels), batch_size, steps, batch_size)


def transformer_task(
    steps: int, width: int = 128, depth: int = 5, heads: int = 4, length: int = 64, vocabulary: int = 64,
    batch_size: int = 32, examples: int = 512,
) -> Task:  # fmt: skip
    """A stack of causal blocks, layer norm before attention and before a gelu layer four times as wide, on random walks."""
    keys = jax.random.split(jax.random.key(0), depth + 3)
    walks = jnp.cumsum(jax.random.randint(keys[0], (examples, length + 1), -3, 4), axis=1) % vocabulary
    normal = lambda key, m, n: jax.random.normal(key, (m, n)) / jnp.sqrt(m)  # noqa: E731
    norm = lambda: {"scale": jnp.ones(width), "shift": jnp.zeros(width)}  # noqa: E731

    def block(key: Array) -> Any:
        k = jax.random.split(key, 4)
        return {
            "attention": {"norm": norm(), "in": normal(k[0], width, 3 * width), "out": normal(k[1], width, width)},
            "layer": {"norm": norm(), "in": normal(k[2], width, 4 * width), "out": normal(k[3], 4 * width, width)},
        }

    params = {
        "tokens": jax.random.normal(keys[1], (vocabulary, width)),
        "places": jax.random.normal(keys[2], (length, width)),
        "blocks": [block(key) for key in keys[3:]],
        "out": {"norm": norm(), "w": jnp.zeros((width, vocabulary))},
    }
    mask = jnp.tril(jnp.ones((length, length), bool))

    def cross_entropy(params: Any, batch: Any) -> Array:
        (walks,) = batch
        x = params["tokens"][walks[:, :-1]] + params["places"]
        for block in params["blocks"]:
            p = block["attention"]
            split = (*x.shape[:2], heads, width // heads)
            q, k, v = (part.reshape(split) for part in jnp.split(_normalized(x, p["norm"]) @ p["in"], 3, axis=-1))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // heads)
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]
            p = block["layer"]
            x = x + jax.nn.gelu(_normalized(x, p["norm"]) @ p["in"]) @ p["out"]
        return _cross_entropy(_normalized(x, params["out"]["norm"]) @ params["out"]["w"], walks[:, 1:])

    return Task(cross_entropy, params, (walks,), batch_size, steps, batch_size)


def _normalized(x: Array, p: Any) -> Array:
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * p["scale"] + p["shift"]


def _cross_entropy(logits: Array, y: Array) -> Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], axis=-1))


def _images(count: int) -> tuple[Array, Array]:
    """MNIST where its folder is known, else noise of the same shape: float32 [count, 28, 28, 1], int32 [count]."""
    if "HYPERGRAD_DATA" in os.environ:
        train = _data.load("mnist", None).train
        return jnp.asarray(train.x[:count].reshape(-1, 28, 28, 1)), jnp.asarray(train.y[:count])
    k1, k2 = jax.random.split(jax.random.key(0))
    return jax.random.normal(k1, (count, 28, 28, 1)), jax.random.randint(k2, (count,), 0, 10)


class Workload(NamedTuple):
    title: str
    task: Callable[[], Task]
    tiny: Callable[[], Task]  # the same in miniature, for the tests
    options: bool = False  # whether opponents are compiled with the options of ours, too
    loops: bool = False  # whether opponents are run from Python too: XLA:CPU has one core for a convolution inside a scan


WORKLOADS = {
    "mlp": Workload(
        "MLP 784-64-64-10, batch 100, T = 1024",
        functools.partial(mlp_task, 1024),
        functools.partial(mlp_task, 16, (12, 5, 3), 4, 20),
        options=True,
    ),
    "wide_mlp": Workload(
        "MLP 784-256-256-10, batch 500, T = 256",
        functools.partial(mlp_task, 256, (784, 256, 256, 10), 500),
        functools.partial(mlp_task, 12, (9, 7, 3), 4, 20),
        options=True,
    ),
    "conv": Workload(
        "two 3x3 convolutions on 28x28, batch 128, T = 200",
        functools.partial(conv_task, 200),
        functools.partial(conv_task, 6, (2, 2), 2, 8),
        loops=True,
    ),
    "transformer": Workload(
        "transformer, 1M parameters, 64 tokens, batch 32, T = 100",
        functools.partial(transformer_task, 100),
        functools.partial(transformer_task, 4, 4, 1, 2, 3, 5, 2, 6),
    ),
}
