"""The optimizers of `optimizer_race`: where their constants are searched, and how they are learned."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer


Point = dict[str, Any]  # hyperparameter -> value
RATES = ("learning_rate", "adam_learning_rate", "momentum_rate", "adam_rate", "muon_rate")  # scheduled when learned
DECAYS = ("momentum", "b1", "b2")


class Contestant(NamedTuple):
    make: Callable[[Point, Any], Any]  # hyperparameters in natural units, the task's function of labels -> optimizer
    ranges: dict[str, tuple[float, float]]  # drawn uniformly in the logarithm; of a decay, in that of 1 - decay


_KEPT = {"momentum": (0.5, 0.99), "b1": (0.5, 0.99), "b2": (0.9, 0.9999)}


def _adamw(h: Point) -> Any:
    return hg.AdamW(h["adam_learning_rate"], weight_decay=h["weight_decay"])


def _muon(h: Point, labels: Any) -> Any:
    muon = hg.Muon(h["learning_rate"], h["momentum"], h["weight_decay"])
    return hg.partition({"matrix": muon, "rest": _adamw(h)}, labels)


def _shampoo(h: Point, labels: Any) -> Any:
    shampoo = hg.Shampoo(
        h["learning_rate"], h["momentum"], h["b2"], h["weight_decay"], h["exponent"], every=10, graft="adam"
    )
    return hg.partition({"matrix": shampoo, "rest": _adamw(h)}, labels)


CONTESTANTS = {
    "SGD": Contestant(
        lambda h, _: hg.SGD(h["learning_rate"], h["momentum"]), {"learning_rate": (0.03, 10), "momentum": _KEPT["momentum"]}
    ),
    "Nesterov": Contestant(
        lambda h, _: hg.Nesterov(h["learning_rate"], h["momentum"]),
        {"learning_rate": (0.003, 1), "momentum": _KEPT["momentum"]},
    ),
    "AdamW": Contestant(
        lambda h, _: hg.AdamW(h["learning_rate"], h["b1"], h["b2"], weight_decay=h["weight_decay"]),
        {"learning_rate": (3e-4, 0.1), "b1": _KEPT["b1"], "b2": _KEPT["b2"], "weight_decay": (1e-3, 1)},
    ),
    "Lion, smooth": Contestant(
        lambda h, _: hg.Lion(h["learning_rate"], h["b1"], h["b2"], h["weight_decay"], h["temperature"]),
        {
            "learning_rate": (1e-4, 0.03), "b1": _KEPT["b1"], "b2": _KEPT["momentum"], "weight_decay": (1e-3, 1),
            "temperature": (1e-4, 1e-2),
        },
    ),
    "Muon": Contestant(
        _muon,
        {
            "learning_rate": (3e-3, 0.3), "adam_learning_rate": (3e-4, 0.1), "momentum": _KEPT["momentum"],
            "weight_decay": (1e-3, 1),
        },
    ),
    "Shampoo": Contestant(
        _shampoo,
        {
            "learning_rate": (3e-4, 0.1), "adam_learning_rate": (3e-4, 0.1), "momentum": _KEPT["momentum"],
            "b2": _KEPT["b2"], "weight_decay": (1e-3, 1), "exponent": (0.1, 0.5),
        },
    ),
    "mixture": Contestant(
        lambda h, _: Mixture(h["momentum_rate"], h["adam_rate"], h["muon_rate"], h["b1"], h["b2"]),
        {"learning_rate": (1e-3, 0.1), "b1": _KEPT["b1"], "b2": _KEPT["b2"]},
    ),
}  # fmt: skip
PARTS = ("momentum_rate", "adam_rate", "muon_rate")  # of the mixture: what its learning rate is divided among


def drawn(contestant: Contestant, count: int, rng: np.random.Generator) -> Point:
    """{hyperparameter: float32 [count]}"""
    points = {}
    for name, (low, high) in contestant.ranges.items():
        decay = name in DECAYS
        ends = [math.log(1 - x) if decay else math.log(x) for x in (low, high)]
        values = np.exp(rng.uniform(*sorted(ends), count))
        points[name] = jnp.asarray(1 - values if decay else values, jnp.float32)
    if contestant.make is CONTESTANTS["mixture"].make:
        rate = points.pop("learning_rate")
        points |= {name: rate / len(PARTS) for name in PARTS}
    return points


def scheduled(point: Point, steps: int) -> Point:
    """The same, with rates as one value per step."""
    return {name: hg.PerStep(jnp.full(steps, x)) if name in RATES else x for name, x in point.items()}


def learnable(point: Point) -> Any:
    domain = lambda name: hg.unit_interval if name in DECAYS else hg.positive  # noqa: E731
    return {name: domain(name)(x) for name, x in point.items()}


def _mixed(h: Any, z: Any) -> Array:
    momentum = _unit(z.mean)
    adam = _unit(z.mean * jax.lax.rsqrt(z.square + 1e-16))
    muon = _unit(_orthogonalized(z.mean)) if z.mean.ndim == 2 else momentum
    return -(h.momentum_rate * momentum + h.adam_rate * adam + h.muon_rate * muon)


def _unit(x: Array) -> Array:
    """Of root mean square 1, where x is not zero."""
    return x * jax.lax.rsqrt(jnp.mean(x * x) + 1e-16)


def _orthogonalized(x: Array) -> Array:
    """Singular values towards 1, by five steps of Newton and Schulz with the coefficients of Muon (Jordan et al. 2024)."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x * jax.lax.rsqrt(jnp.sum(x * x) + 1e-16)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


class Mixture(Optimizer):
    """m, s: means of g and g^2;  w <- w - a1 u(m) - a2 u(m / sqrt(s)) - a3 u(NS(m)), u(x) = x / rms(x).

    A share of each of three optimizers, of steps of equal size: momentum, Adam, and Muon (for what is no matrix, momentum).
    """

    momentum_rate: Any
    adam_rate: Any
    muon_rate: Any
    b1: Any = 0.9
    b2: Any = 0.999

    chain = (
        Link("mean", lambda h, z, g: (1 - h.b1) * g, decay="b1"),
        Link("square", lambda h, z, g: (1 - h.b2) * g * g, decay="b2", wide=True),
        Link("params", _mixed),
    )
