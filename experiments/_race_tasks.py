"""What the optimizers of `optimizer_race` train: three networks for images, and a small transformer for text."""

import abc
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import hypergrad as hg
from experiments import _data, _models, language_model


class Task(abc.ABC):
    """A network, its data, and which of its leaves are matrices to a rule of matrices."""

    batch_size: int = 50

    @abc.abstractmethod
    def init(self, key: Array) -> Any: ...

    @abc.abstractmethod
    def loss(self, params: Any, theta: Any, batch: Any) -> Array: ...

    @abc.abstractmethod
    def batches(self, key: Array, steps: int) -> Callable[[Array], Any]: ...

    @abc.abstractmethod
    def validation(self, params: Any) -> Array: ...

    @abc.abstractmethod
    def test(self, params: Any) -> Array: ...

    def labels(self, params: Any) -> Any:
        """ "matrix" or "rest" for each leaf."""
        return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "rest", params)


class Images(Task):
    """A network of tanh layers on flat images."""

    def __init__(self, data: _data.Data, hidden: tuple[int, ...]) -> None:
        self.x, self.y = (jnp.asarray(part) for part in data.train)
        self.kept = {"validation": data.validation, "test": data.test}
        self.sizes = (data.train.x.shape[1], *hidden, 10)

    def init(self, key: Array) -> Any:
        scale = {f"layer_{i + 1}": {"weights": n**-0.5, "biases": 0.0} for i, n in enumerate(self.sizes[:-1])}
        return _models.init_mlp(key, self.sizes, scale)

    def logits(self, params: Any, x: Array) -> Array:
        return _models.apply_mlp(params, x)

    def loss(self, params: Any, theta: Any, batch: Any) -> Array:
        x, y = batch
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(self.logits(params, x)), y[:, None], axis=1))

    def batches(self, key: Array, steps: int) -> Callable[[Array], Any]:
        return hg.minibatches((self.x, self.y), self.batch_size, key)

    def validation(self, params: Any) -> Array:
        return self.loss(params, None, self.kept["validation"])

    def test(self, params: Any) -> Array:
        return self.loss(params, None, self.kept["test"])


class Convolutions(Images):
    """Two layers of 3 x 3 patches with 2 x 2 means after each, and a linear one, on 16 x 16 pixels of three colours.

    A layer is a matrix that patches are multiplied with.
    """

    side, channels = 16, (8, 16)

    def __init__(self, data: _data.Data) -> None:
        super().__init__(data, ())

    def init(self, key: Array) -> Any:
        first, second = self.channels
        rows = {"first": 27, "second": 9 * first, "out": second * (self.side // 4) ** 2}
        columns = {"first": first, "second": second, "out": 10}
        keys = dict(zip(rows, jax.random.split(key, 3), strict=True))
        draw = lambda name: jax.random.normal(keys[name], (rows[name], columns[name])) / rows[name] ** 0.5  # noqa: E731
        return {name: {"weights": draw(name), "biases": jnp.zeros(columns[name])} for name in rows}

    def logits(self, params: Any, x: Array) -> Array:
        x = x.reshape(-1, self.side, self.side, 3)
        for layer in (params["first"], params["second"]):
            x = jnp.tanh(_patches(x) @ layer["weights"] + layer["biases"])
            n, height, width, depth = x.shape
            x = x.reshape(n, height // 2, 2, width // 2, 2, depth).mean(axis=(2, 4))
        return x.reshape(len(x), -1) @ params["out"]["weights"] + params["out"]["biases"]


def _patches(x: Array) -> Array:
    """[n, side, side, channels] -> [n, side, side, 9 channels]: what a 3 x 3 window sees, zeros around."""
    side = x.shape[1]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.concatenate([x[:, i : i + side, j : j + side] for i in range(3) for j in range(3)], axis=-1)


class Text(Task):
    """A transformer of one block that predicts characters; embeddings are no matrices."""

    def __init__(self) -> None:
        config = language_model.Config(width=32, blocks=1, heads=2, context=24, batch_size=8, validation=128)
        self.model = language_model.Experiment(config)

    def init(self, key: Array) -> Any:
        return self.model.init(key)

    def loss(self, params: Any, theta: Any, batch: Any) -> Array:
        return self.model.loss(params, theta, batch)

    def batches(self, key: Array, steps: int) -> Callable[[Array], Any]:
        config = self.model.config
        last = len(self.model.train_set) - config.context - 1
        return hg.stacked(jax.random.randint(key, (steps, config.batch_size), 0, last))

    def validation(self, params: Any) -> Array:
        return self.model.cross_entropy(params, self.model.windows[::2])

    def test(self, params: Any) -> Array:
        return self.model.cross_entropy(params, self.model.windows[1::2])

    def labels(self, params: Any) -> Any:
        return dict.fromkeys(params, "matrix") | {"characters": "rest", "positions": "rest"}


TASKS: dict[str, Callable[[], Task]] = {
    "digits": lambda: Images(_data.load("digits", 0), (32, 32)),
    "mnist": lambda: Images(_data.load("mnist", 0), (32, 32)),
    "cifar10": lambda: Convolutions(_colours()),
    "characters": Text,
}


@functools.cache
def _colours() -> _data.Data:
    """3,000 / 1,000 / 1,000 images of CIFAR-10, means of 2 x 2 pixels, minus the mean image of the first part."""
    with np.load(_data.folder() / "cifar10_subset.npz", allow_pickle=False) as file:
        x, y, x_test, y_test = (file[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    small = [a.reshape(-1, 16, 2, 16, 2, 3).mean(axis=(2, 4)).reshape(len(a), -1) / 128.0 for a in (x, x_test)]
    order = np.random.default_rng(0).permutation(len(x))
    parts = [(small[0][i], y[i]) for i in np.split(order, [3000])] + [(small[1], y_test)]
    mean = parts[0][0].mean(axis=0)
    return _data.Data(*(_data.Split((a - mean).astype(np.float32), b.astype(np.int32)) for a, b in parts))
