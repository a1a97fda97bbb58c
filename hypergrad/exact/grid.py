"""The fixed-point grid: a float x is held as the integer trunc(x * 2^fraction_bits) in an int64.

Invariant: `encode(-x) == -encode(x)`, and integers of the grid add and subtract without loss as long
as every magnitude stays below `2^RANGE_BITS` (then no sum of two of them can wrap).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


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
    rounding is the truncation. Magnitudes are checked by the caller (`magnitude`), not here.
    """
    return (_at_least_float32(x) * 2.0**fraction_bits).astype(jnp.int64)


def decode(z: Array, fraction_bits: int, dtype: np.dtype) -> Array:
    """x = z * 2^-fraction_bits, rounded once to `dtype`: int64 [...] -> float [...]."""
    wide = np.promote_types(dtype, np.float32) if np.dtype(dtype).itemsize < 4 else dtype
    return (z.astype(wide) * jnp.asarray(2.0**-fraction_bits, wide)).astype(dtype)


def magnitude(x: Array, increment: Array) -> Array:
    """max(|x|, |increment|) over a leaf, NaN if either holds one: float [...] -> float32 [].

    Both below `grid_range` before a step means that the step cannot wrap, NaN that a gradient was bad.
    """
    x, increment = _at_least_float32(x), _at_least_float32(increment)
    largest = jnp.max(jnp.maximum(jnp.abs(x), jnp.abs(increment)), initial=0)
    return largest.astype(jnp.float32)


def _at_least_float32(x: Array) -> Array:
    return x.astype(jnp.float32) if jax.dtypes.finfo(x.dtype).bits < 32 else x
