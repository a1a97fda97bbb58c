"""Families of small learning problems: a few examples to adapt to, and others to be judged by.

A family draws `count` tasks of one part of it: ((x, y) to adapt to, (x, y) to judge by), with leading axis [count]. The
parts "train", "validation" and "test" have no task in common, and for characters no alphabet.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments import _characters, _models


Name = Literal["sinusoids", "glyphs", "omniglot"]
Part = Literal["train", "validation", "test"]
Pair = tuple[Array, Array]


class Sinusoids:
    """y = a sin(x + p), a in 0.1..5, p in 0..pi, x in -5..5 (Finn, Abbeel, Levine 2017)."""

    measure = "mean squared error"

    def __init__(self, shots: int, queries: int) -> None:
        self.shots, self.queries = shots, queries

    def tasks(self, key: Array, part: Part, count: int) -> tuple[Pair, Pair]:
        a, p, x = jax.random.split(jax.random.fold_in(key, ("train", "validation", "test").index(part)), 3)
        amplitude = jax.random.uniform(a, (count, 1, 1), minval=0.1, maxval=5.0)
        phase = jax.random.uniform(p, (count, 1, 1), maxval=jnp.pi)
        points = jax.random.uniform(x, (count, self.shots + self.queries, 1), minval=-5.0, maxval=5.0)
        values = amplitude * jnp.sin(points + phase)
        k = self.shots
        return (points[:, :k], values[:, :k]), (points[:, k:], values[:, k:])

    def sizes(self, hidden: tuple[int, ...]) -> tuple[int, ...]:
        return (1, *hidden, 1)

    def loss(self, params: Any, x: Array, y: Array) -> Array:
        """Of one task."""
        return jnp.mean((_models.apply_mlp(params, x) - y) ** 2)


class FewShot:
    """Tell `ways` characters apart from `shots` drawings of each; whole alphabets are kept for validation and test."""

    measure = "cross-entropy (nats)"

    def __init__(self, name: _characters.Name, side: int, ways: int, shots: int, queries: int) -> None:
        self.ways, self.shots, self.queries = ways, shots, queries
        alphabets = [a.images.reshape(len(a.images), _characters.DRAWINGS, -1) for a in _characters.load(name, side)]
        parts = {"train": alphabets[:5], "validation": alphabets[5:6], "test": alphabets[6:]}
        mean = np.concatenate(parts["train"]).mean(axis=(0, 1))
        self.images = {part: jnp.asarray(np.concatenate(images) - mean) for part, images in parts.items()}

    def tasks(self, key: Array, part: Part, count: int) -> tuple[Pair, Pair]:
        images, k = self.images[part], self.shots
        labels = jnp.arange(self.ways)

        def one(key: Array) -> tuple[Pair, Pair]:
            characters, drawings = jax.random.split(key)
            chosen = jnp.argsort(jax.random.uniform(characters, images.shape[:1]))[: self.ways]
            order = jnp.argsort(jax.random.uniform(drawings, (self.ways, _characters.DRAWINGS)), axis=1)
            x = jnp.take_along_axis(images[chosen], order[:, : k + self.queries, None], axis=1)
            pair = lambda x: (x.reshape(-1, x.shape[-1]), jnp.repeat(labels, x.shape[1]))  # noqa: E731
            return pair(x[:, :k]), pair(x[:, k:])

        return jax.vmap(one)(jax.random.split(key, count))

    def sizes(self, hidden: tuple[int, ...]) -> tuple[int, ...]:
        return (self.images["train"].shape[-1], *hidden, self.ways)

    def loss(self, params: Any, x: Array, y: Array) -> Array:
        """Of one task."""
        return _models.cross_entropy(params, x, y)
