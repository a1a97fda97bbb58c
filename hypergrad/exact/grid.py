"""The fixed-point grid: a float x is held as the integer trunc(x * 2^fraction_bits) in an int64.

Invariant: `encode(-x) == -encode(x)`, and integers of the grid add and subtract without loss as long
as every magnitude stays below `2^RANGE_BITS` (then no sum of two of them can wrap).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.exact.limbs import LOW_BITS, Scaled, Value, Wide, wide
from hypergrad.exact.ratio import nearest


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
    unit: Any = 2.0**-fraction_bits
    if isinstance(z, Scaled):
        z, unit = z.z, z.factors[0] * unit
    if isinstance(z, Wide):
        x = z.high.astype(jnp.float64) + z.low.astype(jnp.float64) * 2.0**-LOW_BITS
    else:
        x = z.astype(jnp.float64)
    return (x * unit).astype(dtype)


def widen(z: Array) -> Wide:
    """The same value with a second limb; `fraction_bits` counts those of the high one."""
    return Wide(z, jnp.zeros(z.shape, jnp.int64))


def add(z: Value, increment: Array, fraction_bits: int) -> Value:
    """z + trunc(increment * 2^fraction_bits): int64 [...], float [...] -> int64 [...].

    An increment that no grid value can represent gives a value out of range whatever z is, which `largest` then sees:
    -2^63 for NaN and infinity, 3 * 2^61 for a finite one of 2^62 quanta or more. `Wide` takes 46 bits more. To it and to
    `Scaled`, whose quanta are coarser, the nearest is added.
    """
    in_range = jnp.abs(increment) < grid_range(fraction_bits)
    if isinstance(z, Scaled):
        too_large = (3 * 2.0**61 * z.factors[1]).astype(jnp.int64)
        lost = jnp.where(jnp.isfinite(increment), too_large, jnp.int64(-(2**63)))
        return z._replace(z=_added(z.z, _at_scale(z, increment, fraction_bits), fraction_bits, in_range, lost))
    lost = jnp.where(jnp.isfinite(increment), jnp.int64(3 * 2**61), jnp.int64(-(2**63)))
    return _added(z, increment, fraction_bits, in_range, lost)


def _added(z: Value, increment: Array, fraction_bits: int, in_range: Array, lost: Array) -> Value:
    if isinstance(z, Wide):
        z = _sum(z, increment, fraction_bits, 1)
        return Wide(jnp.where(in_range, z.high, lost), z.low)
    return jnp.where(in_range, z + encode(increment, fraction_bits), lost)


def subtract(z: Value, increment: Array, fraction_bits: int) -> Value:
    """The inverse of `add` wherever the sum is in range."""
    if isinstance(z, Scaled):
        return z._replace(z=subtract(z.z, _at_scale(z, increment, fraction_bits), fraction_bits))
    if isinstance(z, Wide):
        return _sum(z, increment, fraction_bits, -1)
    return z - encode(increment, fraction_bits)


def _at_scale(z: Scaled, increment: Array, fraction_bits: int) -> Array:
    """What the increment is to the integers, in whole quanta where `_sum` does not round."""
    x = increment * z.factors[1]
    return x if isinstance(z.z, Wide) else jnp.round(x * 2.0**fraction_bits) * 2.0**-fraction_bits


def _sum(z: Wide, x: Array, fraction_bits: int, sign: int) -> Wide:
    """z +- round(x * 2^(fraction_bits + 46)). All else is exact, whatever a compiler contracts."""
    quanta = jnp.round(x.astype(jnp.float64) * 2.0 ** (fraction_bits + LOW_BITS))
    whole = jnp.floor(quanta * 2.0**-LOW_BITS)
    rest = nearest(quanta - whole * 2.0**LOW_BITS)
    return wide(z.high + sign * whole.astype(jnp.int64), z.low + sign * rest)


def largest(x: Array) -> Array:
    """max |x| over a decoded leaf: float [...] -> float32 []. In range if below `grid_range`.

    Over a flat leaf: XLA:CPU makes six times as much code of a narrow matrix that is a part of a vector.
    """
    return jnp.max(jnp.abs(x.reshape(-1)), initial=0).astype(jnp.float32)


def is_nan_mark(magnitude: Array, limit: Array) -> Array:
    """Whether an out-of-range magnitude stands for NaN or infinity (see `add`): sums of values in range stay below."""
    return magnitude >= 2 * limit * (1 - 2.0**-20)


def _at_least_float32(x: Array) -> Array:
    return x.astype(jnp.float32) if jax.dtypes.finfo(x.dtype).bits < 32 else x
