"""Means of floats in which order does not matter: each float is rounded once, and integers are added.

Invariant: a `Sum` of the same floats holds the same integers, whatever their order, their groups, or the devices they are
on. At most `TERMS` of them: then nothing wraps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.exact.fixed import LOW_BITS, Fixed, grid_range, two_limbs


TERMS = 2**16  # so many low limbs are below 2^62
SUM_BITS = 40  # the mean of floats below 2^22 in magnitude, each rounded to 2^-86


class Sum(NamedTuple):
    """(high + low 2^-46) quanta of 2^-bits; low limbs are carried at the end only. Call all of it inside
    `jax.enable_x64(True)`."""

    high: Array  # int64 [...]
    low: Array  # int64 [...]
    fits: Array  # bool []: whether all that was added was below `grid_range(bits)`, and a number

    @staticmethod
    def zeros_like(x: Any) -> "Sum":
        return Sum(jnp.zeros(x.shape, jnp.int64), jnp.zeros(x.shape, jnp.int64), jnp.bool_(True))

    def add(self, x: Array, terms: int, bits: int = SUM_BITS) -> "Sum":
        """self + round(x / terms 2^(bits + 46)) 2^-46: float [...], of so many."""
        high, low = two_limbs(x, 2.0**bits / terms)
        largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float64)  # NaN if one is
        return Sum(self.high + high, self.low + low, self.fits & (largest < grid_range(bits)))

    def over(self, axis: str | tuple[str, ...]) -> "Sum":
        """The sum of those of all devices along axes of a mesh, inside `jax.shard_map`."""
        high, low, others = jax.lax.psum((self.high, self.low, (~self.fits).astype(jnp.int32)), axis)
        return Sum(high, low, others == 0)

    def mean(self, dtype: np.dtype, bits: int = SUM_BITS) -> Array:
        """float [...]; NaN, all of it, where something did not fit."""
        carried = Fixed(self.high + (self.low >> LOW_BITS), self.low & (2**LOW_BITS - 1))
        return jnp.where(self.fits, carried.decode(bits, np.dtype(np.float64)), jnp.nan).astype(dtype)
