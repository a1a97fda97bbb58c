"""Values that left the range of their grid: each becomes a record of when, and keeps it to the end of the run.

Invariant: `first_lost` of the last state is the first that left in the whole run. So no step looks at all values: that would
be to read every array once more.

A record is an integer above all values: the greater the earlier the step, with the bits of the magnitude below.

    (2^31 - 2 - step) 2^32 + the bits of the magnitude as a float32
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.exact.limbs import LOW_BITS, Scaled, Value, Wide


STEPS = 2**29 - 2  # that a record can tell apart
_LEAST = 3 * 2**61  # no value that passes as in range comes near it


class Lost(NamedTuple):
    """Which value left first, and when."""

    step: Array  # int32; -1: before the first step; `STEPS`: none did
    magnitude: Array  # float32, of the value; NaN or infinite if it was
    entry: Array  # int32, its place among all of them


def record(step: Any, magnitude: Array) -> Array:
    """int32 [], -1 for before the first step; float32 [...], not negative -> int64 [...]."""
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.uint32).astype(jnp.int64)
    return ((2**31 - 2 - jnp.asarray(step, jnp.int64)) << 32) + bits


def either(taken: Array, z: Value, instead: Array) -> Value:
    """z where `taken`, and else the record `instead`: bool [...], any value, int64 [...]."""
    if isinstance(z, Scaled):
        return z._replace(z=either(taken, z.z, instead))
    return z._replace(high=either(taken, z.high, instead)) if isinstance(z, Wide) else jnp.where(taken, z, instead)


def unless_lost(old: Value, new: Value) -> Value:
    """`new`, and a record where `old` was one."""
    return either(_limb(old) < _LEAST, new, _limb(old))


def plus(z: Wide, high: Array, low: Array, old: Wide | None) -> Wide:
    """z + high 2^46 + low, for a low of any size and sign; where `old` is a record, its low limb.

    The low limb first, and the carry from the new one: floor((z.low + low) / 2^46) = -floor((new - low) / 2^46).
    Its inverse is `wide(z.high - high, z.low - low)`, in `subtract`.
    """
    # So each limb can be written where it was. With a carry from the old one XLA:CPU copied a limb at every step, and made
    # the low one again for each kernel that reads it: a choice between two arrays is stored.
    new = (z.low + low) & (2**LOW_BITS - 1)
    new = new if old is None else jnp.where(old.high < _LEAST, new, old.low)
    return Wide(z.high + high - ((new - low) >> LOW_BITS), new)


@jax.jit
def first_lost(z: Value) -> Lost:
    """The first that left, and of those that left together the one of the lowest index."""
    z = _limb(z).reshape(-1)
    if not z.size:
        return Lost(jnp.int32(STEPS), jnp.float32(0), jnp.int32(0))
    index = jax.lax.argmax((z >> 32).astype(jnp.int32), 0, jnp.int32)  # in 32 bits: it is lowered outside of x64
    found = z[index]
    step = jnp.where(found < _LEAST, STEPS, 2**31 - 2 - (found >> 32)).astype(jnp.int32)
    return Lost(step, jax.lax.bitcast_convert_type(found.astype(jnp.uint32), jnp.float32), index)


def _limb(z: Value) -> Array:
    """Where a value's record is."""
    z = z.z if isinstance(z, Scaled) else z
    return z.high if isinstance(z, Wide) else z
