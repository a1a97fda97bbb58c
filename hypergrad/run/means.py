"""Means over the parts of a batch, term by term: ways to add up that have the same bits in any order of devices.

Invariant: of a kind, what `start`, `add` and `together` have kept depends on the terms and their numbers alone, and not on
which device added which.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.exact import SUM_BITS, Offsets, Sum, exponent_of, power_of_two, sum_range


class Adding(NamedTuple):
    """What is the same for all terms of a mean."""

    terms: int
    offsets: Offsets  # of `Kind.bits`
    exponent: Array  # int32 []: of the unit of what is `Scaled`


class Kind(abc.ABC):
    """How a mean is made of terms like x: float [...]."""

    bits = SUM_BITS

    @abc.abstractmethod
    def start(self, x: Any, count: int) -> Any: ...

    @abc.abstractmethod
    def add(self, kept: Any, x: Array, m: Any, about: Adding) -> Any:
        """m: the number of the term, int32 []."""

    @abc.abstractmethod
    def together(self, kept: Any, axis: Any) -> Any:
        """What all devices along axes of a mesh have kept."""

    @abc.abstractmethod
    def mean(self, kept: Any, x: Any, about: Adding) -> Array:
        """float [...], like x."""

    def rated(self, kept: Any, exponent: Array) -> tuple[Array, Array]:
        """(the exponent that suits what was added, whether the one it was added with is as good)."""
        return exponent, jnp.bool_(True)


@dataclasses.dataclass(frozen=True)
class OnGrid(Kind):
    """By a `Sum`: what is below 2^22, in quanta of 2^-72."""

    def start(self, x: Any, count: int) -> Any:
        return Sum.zeros_like(x)

    def add(self, kept: Any, x: Array, m: Any, about: Adding) -> Any:
        return kept.add(x, about.terms, about.offsets, self.bits)

    def together(self, kept: Any, axis: Any) -> Any:
        return kept.over(axis)

    def mean(self, kept: Any, x: Any, about: Adding) -> Array:
        return kept.mean(x.dtype, about.terms, self.bits)


@dataclasses.dataclass(frozen=True)
class InOrder(Kind):
    """Of scalars: all are kept, and added one after the other."""

    def start(self, x: Any, count: int) -> Any:
        return jnp.zeros((count, *x.shape), x.dtype)

    def add(self, kept: Any, x: Array, m: Any, about: Adding) -> Any:
        return kept.at[m].set(x)

    def together(self, kept: Any, axis: Any) -> Any:
        return jax.lax.psum(kept, axis)  # of which all but one are zeros

    def mean(self, kept: Any, x: Any, about: Adding) -> Array:
        wide = kept.astype(np.promote_types(x.dtype, np.float32))
        total = jax.lax.fori_loop(0, about.terms, lambda m, sum: sum + wide[m], jnp.zeros_like(wide[0]))
        return (total / about.terms).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Scaled(Kind):
    """Of what may be of any size: by a `Sum` in quanta of 2^-78 of a unit, for terms below 2^16 of them, and the largest."""

    bits = 30

    def start(self, x: Any, count: int) -> Any:
        return Sum.zeros_like(x), _size(jnp.zeros((), x.dtype))

    def add(self, kept: Any, x: Array, m: Any, about: Adding) -> Any:
        total, largest = kept
        scaled = x.astype(jnp.float64) * power_of_two(-about.exponent)
        return total.add(scaled, about.terms, about.offsets, self.bits), jnp.maximum(largest, _size(x))

    def together(self, kept: Any, axis: Any) -> Any:
        return kept[0].over(axis), jax.lax.pmax(kept[1], axis)

    def mean(self, kept: Any, x: Any, about: Adding) -> Array:
        return (kept[0].mean(jnp.float64, about.terms, self.bits) * power_of_two(about.exponent)).astype(x.dtype)

    def rated(self, kept: Any, exponent: Array) -> tuple[Array, Array]:
        narrow = kept[1].dtype == jnp.int32
        largest = jax.lax.bitcast_convert_type(kept[1], jnp.float32 if narrow else jnp.float64).astype(jnp.float64)
        relative = largest * power_of_two(-exponent)
        fine = (relative < sum_range(self.bits)) & (relative >= (2.0**-40 if narrow else 2.0**-28))
        return exponent_of(largest), fine | (largest == 0) | ~jnp.isfinite(largest)


def _size(x: Array) -> Array:
    """The largest magnitude as the bits of a float, which are in the same order, and NaN above all: int32 or int64 []."""
    wide = jnp.abs(x.astype(np.promote_types(x.dtype, np.float32)))
    whole = jnp.int64 if wide.dtype == jnp.float64 else jnp.int32
    return jnp.max(jax.lax.bitcast_convert_type(wide, whole), initial=0)
