"""A leaf cut into tiles, each with a matrix or a diagonal for each of its axes: where Shampoo's factors lie.

Invariant: the factors of a leaf are one vector, [matrices' upper triangles and diagonals of all tiles of one shape, axis by
axis; then those of the next shape].
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Group(NamedTuple):
    """The tiles of one shape."""

    shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]  # of each tile, its first entry along each axis
    full: tuple[bool, ...]  # of each axis, whether it has a matrix; else it has a diagonal

    def lengths(self) -> list[int]:
        """Of each axis, how many numbers its factor has."""
        return [n * (n + 1) // 2 if full else n for n, full in zip(self.shape, self.full, strict=True)]


class Tiles(NamedTuple):
    """How a leaf is cut; hashable."""

    leaf: tuple[int, ...]
    merged: tuple[int, ...]  # the leaf with neighbouring small axes as one
    groups: tuple[Group, ...]

    @property
    def order(self) -> int:
        return len(self.merged)

    def cut(self, x: Array) -> list[Array]:
        """A leaf -> [tiles, *shape] of each group."""
        x = x.reshape(self.merged)
        return [jnp.stack([x[_place(start, group.shape)] for start in group.starts]) for group in self.groups]

    def put(self, parts: list[Array]) -> Array:
        """The inverse of `cut`."""
        x = jnp.zeros(self.merged, parts[0].dtype)
        for group, part in zip(self.groups, parts, strict=True):
            for start, tile in zip(group.starts, part, strict=True):
                x = x.at[_place(start, group.shape)].set(tile)
        return x.reshape(self.leaf)

    def pack(self, factors: list[list[Array]], dtype: np.dtype) -> Array:
        """[tiles, n, n] or [tiles, n] of each group and axis -> the vector. dtype: of one that is empty."""
        parts = [
            (upper(x) if full else x).reshape(-1)
            for group, of_group in zip(self.groups, factors, strict=True)
            for x, full in zip(of_group, group.full, strict=True)
        ]
        return jnp.concatenate(parts) if parts else jnp.zeros(0, dtype)

    def unpack(self, vector: Array) -> list[list[Array]]:
        """The inverse of `pack`."""
        factors, begin = [], 0
        for group in self.groups:
            of_group = []
            for n, full, length in zip(group.shape, group.full, group.lengths(), strict=True):
                x = vector[begin : begin + len(group.starts) * length].reshape(-1, length)
                of_group.append(from_upper(x, n) if full else x)
                begin += x.size
            factors.append(of_group)
        return factors

    def squares(self, g: Array) -> Array:
        """G G^T over all axes but one, of each axis, or its diagonal: the vector."""
        return self.pack(
            [[_square(x, axis, full) for axis, full in enumerate(group.full)] for group, x in self.each(g)], g.dtype
        )

    def each(self, g: Array) -> list[tuple[Group, Array]]:
        return list(zip(self.groups, self.cut(g), strict=True))

    def powers(self, vector: Array, power: Callable[[Array], Array], of_numbers: Callable[[Array], Array]) -> Array:
        """The vector with `power` of each matrix [tiles, n, n], and `of_numbers` of each diagonal [tiles, n]."""
        if not self.groups:
            return vector  # of nothing: what is read is what is used
        factors = zip(self.groups, self.unpack(vector), strict=True)
        return self.pack(
            [
                [(power if full else of_numbers)(x) for x, full in zip(own, group.full, strict=True)]
                for group, own in factors
            ],
            vector.dtype,
        )

    def times(self, vector: Array, g: Array) -> Array:
        """Each tile multiplied by its factors, each along its axis."""
        parts = []
        for (group, x), factors in zip(self.each(g), self.unpack(vector), strict=True):
            for axis, (factor, full) in enumerate(zip(factors, group.full, strict=True)):
                x = _multiplied(x, axis, factor, full)
            parts.append(x)
        return self.put(parts) if parts else g + jnp.sum(vector)  # of nothing: what is read is what is used

    @functools.partial(jax.jit, static_argnums=(0, 1))  # not a program for each operation
    def identity(self, dtype: np.dtype) -> Array:
        """The vector of ones on all diagonals."""
        one = lambda n, full: jnp.eye(n, dtype=dtype) if full else jnp.ones(n, dtype)  # noqa: E731
        tiled = lambda x, group: jnp.broadcast_to(x, (len(group.starts), *x.shape))  # noqa: E731
        return self.pack([[tiled(one(n, f), o) for n, f in zip(o.shape, o.full, strict=True)] for o in self.groups], dtype)


@functools.cache
def tiles(shape: tuple[int, ...], block_size: int | None, max_size: int) -> Tiles:
    """Of a leaf: axes are cut into pieces of at most block_size; None: not at all. Axes of more than max_size, and leaves of
    one axis, have diagonals."""
    merged = _merged(shape, block_size or 1)
    cuts = [[(i, min(block_size or n, n - i)) for i in range(0, n, block_size or n or 1)] for n in merged]
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for pieces in itertools.product(*cuts):
        found.setdefault(tuple(n for _, n in pieces), []).append(tuple(i for i, _ in pieces))
    full = lambda lengths: tuple(len(merged) > 1 and n <= max_size for n in lengths)  # noqa: E731
    return Tiles(shape, merged, tuple(Group(n, tuple(starts), full(n)) for n, starts in found.items()))


def _merged(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Neighbouring axes as one, while their product is at most the limit; leaves of one axis or none as a vector."""
    if len(shape) < 2:
        return (math.prod(shape),)
    merged = [shape[0]]
    for n in shape[1:]:
        if merged[-1] * n <= limit and len(shape) > 2:
            merged[-1] *= n
        else:
            merged.append(n)
    return tuple(merged) if len(merged) > 1 else (math.prod(shape[:-1]), shape[-1])


def _place(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(i, i + n) for i, n in zip(start, shape, strict=True))


def _rows(x: Array, axis: int) -> Array:
    """[tiles, ..] -> [tiles, n, everything else]"""
    moved = jnp.moveaxis(x, axis + 1, 1)
    return moved.reshape(*moved.shape[:2], -1)


def _square(x: Array, axis: int, full: bool) -> Array:
    rows = _rows(x, axis)
    return rows @ rows.mT if full else jnp.sum(rows * rows, axis=-1)


def _multiplied(x: Array, axis: int, factor: Array, full: bool) -> Array:
    rows = _rows(x, axis)
    rows = factor @ rows if full else factor[..., None] * rows
    moved = jnp.moveaxis(x, axis + 1, 1)
    return jnp.moveaxis(rows.reshape(moved.shape), 1, axis + 1)


def upper(x: Array) -> Array:
    """[tiles, n, n] -> [tiles, n (n + 1) / 2]"""
    i, j = np.triu_indices(x.shape[-1])
    return x[:, i, j]


def from_upper(x: Array, n: int) -> Array:
    """The inverse of `upper`, of symmetric matrices."""
    i, j = np.triu_indices(n)
    place = np.zeros((n, n), np.int32)
    place[i, j] = place[j, i] = np.arange(len(i))
    return x[:, place]
