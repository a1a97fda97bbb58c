"""BackPACK's test problems in the small: logistic regression, and two convolutional networks at a tenth of the width."""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import hypergrad as hg
from experiments import _data


class Problem(abc.ABC):
    """A network and its data: train, validation and test part, each (x [examples, ...], y [examples])."""

    batch_size = 64

    def __init__(self, train: Any, validation: Any, test: Any) -> None:
        self.train, self.kept = train, {"validation": validation, "test": test}

    @abc.abstractmethod
    def init(self, key: Array) -> Any: ...

    @abc.abstractmethod
    def logits(self, params: Any, x: Array) -> Array: ...

    def loss(self, params: Any, theta: Any, batch: Any) -> Array:
        x, y = batch
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(self.logits(params, x)), y[:, None], axis=1))

    def batches(self, key: Array) -> Any:
        return hg.minibatches(self.train, self.batch_size, key)

    def judged(self, params: Any, part: str) -> Array:
        return self.loss(params, None, self.kept[part])


class LogisticRegression(Problem):
    """From zero weights."""

    def init(self, key: Array) -> Any:
        return {"w": jnp.zeros((math.prod(self.train[0].shape[1:]), 10)), "b": jnp.zeros(10)}

    def logits(self, params: Any, x: Array) -> Array:
        return x.reshape(len(x), -1) @ params["w"] + params["b"]


class Convolutions(Problem):
    """Convolutions with ReLU and max-pooling after each, and dense layers. convolutions: (size, channels, "SAME" or
    "VALID"); pool: (window, stride); dense: widths between the last convolution and the classes."""

    convolutions: tuple[tuple[int, int, str], ...]
    pool: tuple[int, int]
    dense: tuple[int, ...]

    def init(self, key: Array) -> Any:
        keys, params, channels = iter(jax.random.split(key, 8)), {}, self.train[0].shape[-1]
        for i, (size, width, _) in enumerate(self.convolutions):
            fan_in = size * size * channels
            kernel = jax.random.normal(next(keys), (size, size, channels, width)) * math.sqrt(2 / fan_in)
            params[f"c{i}"], channels = {"w": kernel, "b": jnp.zeros(width)}, width
        wide = jax.eval_shape(lambda p, x: self._features(p, x), params, self.train[0][:1]).shape[1]
        for i, width in enumerate((*self.dense, 10)):
            matrix = jax.random.normal(next(keys), (wide, width)) * math.sqrt(2 / (wide + width))
            params[f"d{i}"], wide = {"w": matrix, "b": jnp.zeros(width)}, width
        return params

    def _features(self, params: Any, x: Array) -> Array:
        names, (window, stride) = ("NHWC", "HWIO", "NHWC"), self.pool
        for i, (_, _, padding) in enumerate(self.convolutions):
            layer = params[f"c{i}"]
            x = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), padding, dimension_numbers=names) + layer["b"]
            sizes, strides = (1, window, window, 1), (1, stride, stride, 1)
            x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, sizes, strides, "SAME")
        return x.reshape(len(x), -1)

    def logits(self, params: Any, x: Array) -> Array:
        x = self._features(params, x)
        for i in range(len(self.dense)):
            x = jax.nn.relu(x @ params[f"d{i}"]["w"] + params[f"d{i}"]["b"])
        return x @ params[f"d{len(self.dense)}"]["w"] + params[f"d{len(self.dense)}"]["b"]


class TwoLayers(Convolutions):
    """DeepOBS's 2C2D: two convolutions, two dense layers."""

    convolutions, pool, dense = ((5, 3, "SAME"), (5, 6, "SAME")), (2, 2), (102,)


class ThreeLayers(Convolutions):
    """DeepOBS's 3C3D: three convolutions, three dense layers."""

    convolutions, pool, dense = ((5, 6, "VALID"), (3, 10, "VALID"), (3, 13, "SAME")), (3, 2), (51, 26)


def _images(name: Any, side: int) -> list[Any]:
    return [(jnp.asarray(x).reshape(-1, side, side, 1), jnp.asarray(y)) for x, y in _data.load(name, 0)]


def _colours() -> list[Any]:
    """3,000 / 1,000 / 1,000 images of CIFAR-10, minus the mean image of the first part."""
    with np.load(_data.folder() / "cifar10_subset.npz", allow_pickle=False) as file:
        x, y, x_test, y_test = (file[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    order = np.random.default_rng(0).permutation(len(x))
    parts = [(x[i].reshape(-1, 32, 32, 3) / 128.0, y[i]) for i in np.split(order, [3000])]
    parts.append((x_test.reshape(-1, 32, 32, 3) / 128.0, y_test))
    mean = parts[0][0].mean(axis=0)
    return [(jnp.asarray(a - mean, jnp.float32), jnp.asarray(b, jnp.int32)) for a, b in parts]


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "logreg": lambda: LogisticRegression(*_images("digits", 8)),
    "2c2d": lambda: TwoLayers(*_images("digits", 8)),
    "logreg, MNIST": lambda: LogisticRegression(*_images("mnist", 28)),
    "2c2d, Fashion-MNIST": lambda: TwoLayers(*_images("fashion_mnist", 28)),
    "3c3d, CIFAR-10": lambda: ThreeLayers(*_colours()),
}
problem = functools.cache(lambda name: PROBLEMS[name]())
