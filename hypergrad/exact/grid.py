"""The fixed-point grid: a float x is held as the integer trunc(x * 2^fraction_bits) in an int64.

Invariant: `encode(-x) == -encode(x)`, and integers of the grid add and subtract without loss as long
as every magnitude stays below `2^RANGE_BITS` (then no sum of two of them can wrap).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.exact.limbs import LOW_BITS, Value, Wide, wide


RANGE_BITS = 62
_DEFAULT_FRACTION_BITS = {8: 52, 4: 48, 2: 48}  # by bytes per float; 2: float16 and bfloat16


def default_fraction_bits(dtype: np.dtype) -> int:
    """Fraction bits of a parameter's grid: 52 for float64 (range +-1024), 48 below (range +-16384)."""
    return _DEFAULT_FRACTION_BITS[np.dtype(dtype).itemsize]


def grid_range(fraction_bits: int) -> float:
    """The magnitude that a value on the grid must stay below."""
    return 2.0 ** (RANGE_BITS - fraction_bits)


def encode(x: Array, fraction_bits: int) -> Array:
    """integer = trunc(x * 2^fraction_bits), toward zero so that both signs round alike.

    float [...] -> int64 [...]; call it inside `jax.enable_x64(True)`. The scaling is exact, so the only
    rounding is the truncation.
    """
    return (_at_least_float32(x) * 2.0**fraction_bits).astype(jnp.int64)


def decode(z: Value, fraction_bits: int, dtype: np.dtype) -> Array:
    """x = z * 2^-fraction_bits: int64 [...] -> float [...], rounded to float64 and from there to `dtype`.

    Scaled in float64 because XLA's CPU kernels for sums and maxima pull a last multiplication in, constant and all.
    """
    if isinstance(z, Wide):
        x = z.high.astype(jnp.float64) + z.low.astype(jnp.float64) * 2.0**-LOW_BITS
    else:
        x = z.astype(jnp.float64)
    return (x * 2.0**-fraction_bits).astype(dtype)


def widen(z: Array) -> Wide:
    """The same value with a second limb; `fraction_bits` counts those of the high one."""
    return Wide(z, jnp.zeros(z.shape, jnp.uint32))


def add(z: Value, increment: Array, fraction_bits: int) -> Value:
    """z + trunc(increment * 2^fraction_bits): int64 [...], float [...] -> int64 [...].

    An increment that no grid value can represent gives a value out of range whatever z is, which `largest` then sees:
    -2^63 for NaN and infinity, 3 * 2^61 for a finite one of 2^62 quanta or more. For `Wide`, 32 bits more are kept.
    """
    in_range = jnp.abs(increment) < grid_range(fraction_bits)
    lost = jnp.where(jnp.isfinite(increment), jnp.int64(3 * 2**61), jnp.int64(-(2**63)))
    if isinstance(z, Wide):
        z = _sum(z, increment, fraction_bits, 1)
        return Wide(jnp.where(in_range, z.high, lost), z.low)
    return jnp.where(in_range, z + encode(increment, fraction_bits), lost)


def subtract(z: Value, increment: Array, fraction_bits: int) -> Value:
    """The inverse of `add` wherever the sum is in range."""
    if isinstance(z, Wide):
        return _sum(z, increment, fraction_bits, -1)
    return z - encode(increment, fraction_bits)


def _sum(z: Wide, x: Array, fraction_bits: int, sign: int) -> Wide:
    """z +- floor(x * 2^(fraction_bits + 32)); scaling, floor and difference are exact."""
    scaled = _at_least_float32(x) * 2.0**fraction_bits
    whole = jnp.floor(scaled)
    rest = ((scaled - whole) * 2.0**LOW_BITS).astype(jnp.int64)
    return wide(z.high + sign * whole.astype(jnp.int64), z.low.astype(jnp.int64) + sign * rest)


def largest(x: Array) -> Array:
    """max |x| over a decoded leaf: float [...] -> float32 []. In range if below `grid_range`."""
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)


def is_nan_mark(magnitude: Array, limit: Array) -> Array:
    """Whether an out-of-range magnitude stands for NaN or infinity (see `add`): sums of values in range stay below."""
    return magnitude >= 2 * limit * (1 - 2.0**-20)


def _at_least_float32(x: Array) -> Array:
    return x.astype(jnp.float32) if jax.dtypes.finfo(x.dtype).bits < 32 else x
