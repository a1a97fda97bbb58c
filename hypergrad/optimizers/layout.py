"""Parameter leaves side by side: those that share all hyperparameters are one vector to the exact layer.

Invariant: `layout.join(layout.split(vectors)) == vectors`.

What costs by the piece (a kernel, its compilation, a schedule) then costs once for them all. A large leaf is a vector alone,
without its shape: XLA:CPU unrolls the rows of a matrix that has few columns.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


LARGE = 1 / 8  # of all parameters: a leaf of more than that stays by itself, since every step copies those that do not


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which leaves lie in which vector; hashable."""

    groups: tuple[tuple[int, ...], ...]  # indices of leaves, in the order of their first
    shapes: tuple[tuple[int, ...], ...]  # of the leaves
    flat: bool  # if not, each leaf is by itself and keeps its shape, for rules that may read it

    def join(self, leaves: list[Array]) -> list[Array]:
        """One array per leaf -> one per vector."""
        return [self.vector(part) for part in self.parts(leaves)]

    def vector(self, part: list[Array]) -> Array:
        """The leaves of one vector -> the vector."""
        return jnp.concatenate([x.reshape(-1) for x in part]) if self.flat else part[0]

    def parts(self, leaves: list[Any]) -> list[list[Any]]:
        """Those of each vector."""
        return [[leaves[i] for i in group] for group in self.groups]

    def split(self, vectors: list[Array]) -> list[Array]:
        """The inverse of `join`, and of what is computed entry by entry from what it made."""
        leaves: list[Any] = [None] * len(self.shapes)
        for group, vector in zip(self.groups, vectors, strict=True):
            sizes = [math.prod(self.shapes[i]) for i in group]
            parts = [vector] if len(group) == 1 else jax.lax.split(vector, sizes)  # the transpose of a concatenation
            for i, part in zip(group, parts, strict=True):
                leaves[i] = part.reshape(self.shapes[i]) if self.flat else part
        return leaves

    def spread(self, values: list[Any]) -> list[Any]:
        """To each leaf what belongs to its vector."""
        vector = {i: x for x, group in zip(values, self.groups, strict=True) for i in group}
        return [vector[i] for i in range(len(self.shapes))]

    def owner(self, vector: int, entry: Array) -> Array:
        """The leaf that an entry of a vector belongs to: int32 [] -> int32 []."""
        group = self.groups[vector]
        ends = np.cumsum([math.prod(self.shapes[i]) for i in group])[:-1]
        return jnp.asarray(group, jnp.int32)[jnp.sum(entry >= ends, dtype=jnp.int32)]

    def first(self, leaves: list[Any]) -> list[Any]:
        """The first of each vector's."""
        return [part[0] for part in self.parts(leaves)]


def separate(shapes: list[tuple[int, ...]]) -> Layout:
    """Every leaf by itself, in its shape."""
    return Layout(tuple((i,) for i in range(len(shapes))), tuple(shapes), flat=False)


def together(shapes: list[tuple[int, ...]], keys: Sequence[Hashable]) -> Layout:
    """Small leaves of equal keys side by side."""
    sizes = [math.prod(shape) for shape in shapes]
    groups: dict[Hashable, list[int]] = {}
    for i, (size, key) in enumerate(zip(sizes, keys, strict=True)):
        groups.setdefault((i if size > LARGE * sum(sizes) else None, key), []).append(i)
    return Layout(tuple(map(tuple, groups.values())), tuple(shapes), flat=True)
