"""Means of floats in which order does not matter: each float is rounded once, and integers are added.

Invariant: a `Sum` of the same floats holds the same integers, whatever their order, their groups, or the devices they are
on.

To round x to a multiple of 2^-k, add 3 2^(51-k): the last bits of what comes out are the integer x 2^k, of either sign, in
a float64 of known exponent. Its bits are added as they are, modulo 2^64, and those of the offsets taken off at the end. The
offsets are values that XLA does not know: it makes (x + 1) - 1 to x. The bits are unsigned: of XLA's two ways to write a
kernel for a CPU the one that takes signed 64-bit integers alone is three to four times slower with them.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


SUM_BITS = 24  # floats below 2^22 in magnitude, of each its share of the mean rounded to 2^-72
TERMS = 2**13
_LOW_BITS = 48
_LARGEST = 1000  # of the powers of two that are taken: the inverse of each is normal
_RANGE_BITS = 46
_LOST = 2**48  # the high limb of what is out of range: no sum of others comes near it


class Offsets(NamedTuple):
    """What rounds to both limbs."""

    coarse: Array  # float64 []
    fine: Array

    @staticmethod
    def of(bits: int, true: Array) -> "Offsets":
        """true: bool [], which XLA does not see (`hypergrad._isolation.unseen`)."""
        return Offsets(*(jnp.where(true, x, 0) for x in (_offset(bits), _offset(bits + _LOW_BITS))))


class Sum(NamedTuple):
    """(high + low 2^-48) quanta of 2^-bits, off by those of so many offsets. Call it inside `jax.enable_x64(True)`."""

    high: Array  # uint64 [...], modulo 2^64
    low: Array

    @staticmethod
    def zeros_like(x: Any) -> "Sum":
        return Sum(jnp.zeros(x.shape, jnp.uint64), jnp.zeros(x.shape, jnp.uint64))

    def add(self, x: Array, terms: int, offsets: Offsets, bits: int = SUM_BITS) -> "Sum":
        """self + x: float [...], one of so many terms, each below `sum_range(bits)` in magnitude."""
        coarse, fine = offsets
        y = x.astype(jnp.float64) * _shrink(terms)
        fits = jnp.abs(y) < sum_range(bits) * _shrink(terms)  # NaN does not
        high = y + coarse
        low = (y - (high - coarse)) + fine
        lost = _bits(_offset(bits)) + _LOST
        high = jnp.where(fits, _bits(high), lost)
        return Sum(self.high + high, self.low + _bits(low))

    def over(self, axis: str | tuple[str, ...]) -> "Sum":
        """The sum of those of all devices along axes of a mesh, inside `jax.shard_map`."""
        return Sum(*jax.lax.psum(tuple(self), axis))

    def mean(self, dtype: Any, terms: int, bits: int = SUM_BITS) -> Array:
        """Of all the terms: float [...]; NaN where one was out of range or no number."""
        high, low = (_without(x, terms, k) for x, k in ((self.high, bits), (self.low, bits + _LOW_BITS)))
        found = high.astype(jnp.float64) + low.astype(jnp.float64) * 2.0**-_LOW_BITS
        return jnp.where(high < _LOST // 2, found * (2.0**-bits / _shrink(terms) / terms), jnp.nan).astype(dtype)


def total(x: Array, shape: tuple[int, ...]) -> Array:
    """x, float, summed over the axes along which `shape` was broadcast to it, in no order: by integers that go with the
    largest entry of each sum; NaN from 2^1000 on. Call it inside `jax.enable_x64(True)`."""
    lead = x.ndim - len(shape)
    axes = (*range(lead), *(lead + i for i, n in enumerate(shape) if n != x.shape[lead + i]))
    bits = 61 - math.ceil(math.log2(max(x.size // max(math.prod(shape), 1), 1)))
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0).astype(jnp.float64)
    unit = power_of_two(exponent_of(largest))
    y = x.astype(jnp.float64) / unit * 2.0**bits
    high = jnp.round(y)
    low = jnp.round((y - high) * 2.0**bits)
    added = [jnp.sum(part.astype(jnp.int64), axis=axes, keepdims=True) for part in (high, low)]
    sums = [part.astype(jnp.float64) * 2.0**-bits for part in added]
    found = (sums[0] + sums[1] * 2.0**-bits) * unit
    return jnp.where(largest < 2.0**_LARGEST, found, jnp.nan).astype(x.dtype).reshape(shape)


def exponent_of(x: Array) -> Array:
    """int32, with x < 2^exponent <= 2 x: float64 >= 0; 0 of what is zero or no number. From -1000 to 1000: beyond, it is
    cut off.

    By its bits: JAX makes `jnp.frexp` of float64 when a program is lowered, which is outside of `jax.enable_x64`.
    """
    found = (_bits(x) >> 52).astype(jnp.int32) - 1022
    return jnp.where(jnp.isfinite(x) & (x > 0), jnp.clip(found, -_LARGEST, _LARGEST), 0)


def power_of_two(exponent: Array) -> Array:
    """2^exponent, float64, of what `exponent_of` gives, of either sign."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int64) + 1023) << 52, jnp.float64)


def sum_range(bits: int) -> float:
    """The magnitude that what is added must stay below."""
    return 2.0 ** (_RANGE_BITS - bits)


def _shrink(terms: int) -> float:
    """A power of two by which the terms are so small that their sum is in the range of one."""
    return 2.0 ** -math.ceil(math.log2(terms))


def _offset(bits: int) -> np.float64:
    """What rounds a float64 below 2^(51 - bits) to a multiple of 2^-bits when it is added."""
    return np.float64(3 * 2.0 ** (51 - bits))


def _bits(x: Any) -> Array:
    return jax.lax.bitcast_convert_type(jnp.float64(x), jnp.uint64)


def _without(total: Array, terms: int, bits: int) -> Array:
    """int64: a sum of bits less those of its offsets."""
    return jax.lax.bitcast_convert_type(total - terms * _bits(_offset(bits)), jnp.int64)
