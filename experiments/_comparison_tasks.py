"""The tasks of `optuna_comparison`: hyperparameters with a start and bounds, validation and test loss, hypergradient.

A task is the same function for every method: training from the key of its seed, always with the same initialization and
batches, then the loss on validation and on test images. `start` is where all of them begin.
"""

import abc
import functools
import os
import pathlib
from typing import Any

import jax
import numpy as np
import optuna

import hypergrad as hg
from experiments import _data, _models, learning_rate_schedules, optuna_quickstart


Bounds = tuple[float, float, bool]  # low, high, logarithmic


def _jit(function: Any) -> Any:
    """As `hg.optimize` compiles. Asked for here: it starts JAX, whose threads inherit the core of a worker."""
    return jax.jit(function, compiler_options=hg.compiler_options())


class Task(abc.ABC):
    """Subclasses give `start` (a tree of domains), `bounds` by its first key, `train`, `losses`, `steps`, `title`."""

    title: str
    steps: int
    start: dict[str, Any]
    bounds: dict[str, Bounds]

    @abc.abstractmethod
    def train(self, natural: Any, key: jax.Array) -> Any: ...

    @abc.abstractmethod
    def losses(self, params: Any) -> tuple[jax.Array, jax.Array]:
        """(validation, test)."""

    @functools.cached_property
    def value(self) -> Any:
        """(natural hypers, key) -> (validation, test), compiled."""
        return _jit(lambda natural, key: self.losses(self.train(natural, key)))

    @functools.cached_property
    def value_and_grad(self) -> Any:
        """(stored hypers, key) -> ((validation, test), hypergradient as stored), compiled."""
        both = lambda hypers, key: self.losses(self.train(hg.natural(hypers), key))  # noqa: E731
        return _jit(jax.value_and_grad(both, has_aux=True))

    @functools.cached_property
    def places(self) -> list[tuple[str, str, Any]]:
        """(name of its numbers, first key, shape) of each leaf of natural hypers."""
        leaves = jax.tree_util.tree_leaves_with_path(hg.natural(self.start))
        return [(_name(path), path[0].key, np.shape(x)) for path, x in leaves]

    @property
    def count(self) -> int:
        return sum(int(np.prod(shape)) for _, _, shape in self.places)

    def suggest(self, trial: optuna.Trial) -> Any:
        """Natural hypers, each number by a call of its own."""
        leaves = []
        for name, key, shape in self.places:
            low, high, log = self.bounds[key]
            numbers = [trial.suggest_float(n, low, high, log=log) for n in _numbered(name, shape)]
            leaves.append(np.asarray(numbers, np.float32).reshape(shape))
        return jax.tree.unflatten(jax.tree.structure(hg.natural(self.start)), leaves)

    def suggest_constants(self, trial: optuna.Trial) -> Any:
        """The same with one number for all that has one first key: what one would do without gradients."""
        numbers = {key: trial.suggest_float(key, low, high, log=log) for key, (low, high, log) in self.bounds.items()}
        leaves = [np.full(shape, numbers[key], np.float32) for _, key, shape in self.places]
        return jax.tree.unflatten(jax.tree.structure(hg.natural(self.start)), leaves)

    def start_numbers(self) -> dict[str, float]:
        """The start, for `study.enqueue_trial`."""
        found = {}
        for (name, _, shape), x in zip(self.places, jax.tree.leaves(hg.natural(self.start)), strict=True):
            found |= dict(zip(_numbered(name, shape), np.ravel(x).astype(float).tolist(), strict=True))
        return found

    def start_constants(self) -> dict[str, float]:
        leaves = zip(self.places, jax.tree.leaves(hg.natural(self.start)), strict=True)
        return {key: float(np.ravel(x)[0]) for (_, key, _), x in leaves}


class Four(Task):
    """Learning rate, momentum, scale of the initial weights, L2 penalty of a 64-32-10 tanh network on the digits."""

    title = "four hyperparameters, digits"
    bounds = {
        "learning_rate": (1e-3, 10.0, True), "momentum": (0.1, 0.99, False), "init_scale": (1e-3, 1.0, True),
        "l2": (1e-6, 1e-1, True),
    }  # fmt: skip

    def __init__(self, tiny: bool = False) -> None:
        self.steps = 3 if tiny else 60
        self.digits = optuna_quickstart.Digits(self.steps)
        self.start = self.stored({"learning_rate": 0.1, "momentum": 0.5, "init_scale": 0.1, "l2": 1e-4})

    @staticmethod
    def stored(natural: Any) -> dict[str, Any]:
        return {k: hg.unit_interval(x) if k == "momentum" else hg.positive(x) for k, x in natural.items()}

    def train(self, natural: Any, key: jax.Array) -> Any:
        return self.digits.train_fn(natural, key)

    def losses(self, params: Any) -> tuple[jax.Array, jax.Array]:
        return self.digits.val_fn(params), _models.cross_entropy(params, *self.digits.data.test)


class Schedules(Task):
    """A learning rate and a momentum for each of 100 steps, layer and kind, and eight initial scales: 1,608 numbers."""

    bounds = {"learning_rate": (0.01, 3.0, True), "momentum": (0.1, 0.95, False), "init_scale": (0.005, 0.5, True)}

    def __init__(self, tiny: bool = False) -> None:
        data: _data.Name = "mnist" if not tiny and _has_mnist() else "digits"
        self.steps = 3 if tiny else 100
        config = learning_rate_schedules.Config(data=data, steps=self.steps, hidden=() if tiny else (50, 50, 50))
        self.experiment = learning_rate_schedules.Experiment(config, learning_rate_schedules.load(data))
        self.start = {k: v for k, v in self.experiment.start().items() if k != "seed"}
        self.title = f"{self.count:,} hyperparameters, {data.replace('mnist', 'MNIST')}"

    def train(self, natural: Any, key: jax.Array) -> Any:
        arguments, options = self.experiment.arguments({**natural, "seed": 0}, key)
        words = -(-self.steps * 7 // 64) + 1  # room for momenta of 0.1: 3.4 bits a step
        return hg.train(*arguments, **options, adjoint=hg.Reversible(capacity=words)).params

    def losses(self, params: Any) -> tuple[jax.Array, jax.Array]:
        data = self.experiment.data
        return tuple(_models.cross_entropy(params, *split) for split in (data.validation, data.test))


TASKS: dict[str, type[Task]] = {"four": Four, "schedules": Schedules}


def _has_mnist() -> bool:
    folder = os.environ.get("HYPERGRAD_DATA")
    return folder is not None and (pathlib.Path(folder) / "mnist.npz").exists()


def _name(path: Any) -> str:
    keys = (getattr(k, "key", None) for k in path)
    return ".".join(str(k) for k in keys if k is not None)


def _numbered(name: str, shape: tuple[int, ...]) -> list[str]:
    return [name] if shape == () else [f"{name}.{i}" for i in range(int(np.prod(shape)))]
