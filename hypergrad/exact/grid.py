"""The fixed-point grid: a float x is held as the integer trunc(x * 2^fraction_bits) in an int64.

Invariant: `encode(-x) == -encode(x)`, and integers of the grid add and subtract without loss as long
as every magnitude stays below `2^RANGE_BITS` (then no sum of two of them can wrap).

A sum that does not stay there is replaced by a record of when it left (exact/lost.py).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.exact.limbs import LOW_BITS, Scaled, Value, Wide, wide
from hypergrad.exact.lost import either, plus, record, unless_lost
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
    return (x.astype(_at_least_float32(x.dtype)) * 2.0**fraction_bits).astype(jnp.int64)


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


def add(z: Value, increment: Array, fraction_bits: int, step: Any = -1, old: Value | None = None) -> Value:
    """z + trunc(increment * 2^fraction_bits): int64 [...], float [...] -> int64 [...].

    Where that is out of range, or no number, a record of it; step: int32 [], -1 for before the first. Where `old`, the value
    before its decay, is a record, that. To `Wide`, which has 46 bits more, and to `Scaled`, whose quanta are coarser, the
    nearest is added.
    """
    # The increment is compared here, and not added as a float: XLA would make one expression of the sum, the increment and
    # the gradient it is made of, and round it otherwise than on the way back.
    limit = grid_range(fraction_bits)
    total = _plus(z, _quanta(z, increment, fraction_bits), old)
    update = jnp.abs(increment).astype(_at_least_float32(increment.dtype))
    magnitude = jnp.where(update < limit, jnp.abs(decode(total, fraction_bits, update.dtype)), update)
    new = either(magnitude < limit, total, record(step, magnitude.astype(jnp.float32)))
    return new if old is None else unless_lost(old, new)


def subtract(z: Value, increment: Array, fraction_bits: int) -> Value:
    """The inverse of `add` wherever the sum is in range."""
    return _minus(z, _quanta(z, increment, fraction_bits))


def _plus(z: Value, quanta: Any, old: Value | None) -> Value:
    if isinstance(z, Scaled):
        return z._replace(z=_plus(z.z, quanta, old if old is None else old.z))
    return plus(z, quanta[0], quanta[1], old) if isinstance(z, Wide) else z + quanta


def _minus(z: Value, quanta: Any) -> Value:
    if isinstance(z, Scaled):
        return z._replace(z=_minus(z.z, quanta))
    return wide(z.high - quanta[0], z.low - quanta[1]) if isinstance(z, Wide) else z - quanta


def _quanta(z: Value, increment: Array, fraction_bits: int) -> Any:
    """What the increment is to the integers: int64 [...], or two, of which the second may have any sign."""
    per_unit: Any = 2.0**fraction_bits
    if isinstance(z, Scaled):
        z, per_unit = z.z, z.factors[1] * per_unit
        if not isinstance(z, Wide):
            return jnp.round(increment * per_unit).astype(jnp.int64)
    if not isinstance(z, Wide):
        return encode(increment, fraction_bits)
    # Rounded once, to 2^-(fraction_bits + 46). All else is exact, whatever a compiler contracts.
    quanta = jnp.round(increment.astype(jnp.float64) * (per_unit * 2.0**LOW_BITS))
    whole = jnp.floor(quanta * 2.0**-LOW_BITS)
    return whole.astype(jnp.int64), nearest(quanta - whole * 2.0**LOW_BITS)


def _at_least_float32(dtype: Any) -> Any:
    return jnp.float32 if jax.dtypes.finfo(dtype).bits < 32 else dtype
