"""Values of one int64 or of two (`Wide`), and the four integer operations that a reversible multiplication is made of.

Invariant: `join(*split(c, k), k) == c`, and `times(q, n, remainder(c, q, n)) == c` for `q = over(c, n)`.

A decay by n/d puts a digit of up to d quanta into a value, and one that waits makes quanta coarser by as much. For a mean of
squares that is too much: g^2 has twice the decades of g. A second limb moves these quanta 46 bits down.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from hypergrad.exact.ratio import divide


WIDE_DENOMINATOR = 2**16  # the largest d
LOW_BITS = 46  # even, to be divided by halves; a low limb times d must stay below 2^63


class Wide(NamedTuple):
    """The integer high * 2^46 + low, |high| <= 2^62 and 0 <= low < 2^46: int64 arrays of one shape."""

    high: Array
    low: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.high.shape


class Scaled(NamedTuple):
    """z times a scale that the whole leaf shares: integers, and float64 [2], the scale and its inverse."""

    z: "Value"
    factors: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.z.shape


Value = Any  # an int64 array, `Wide`, or either of them `Scaled`


def wide(high: Array, low: Array) -> Wide:
    """high * 2^46 + low, for a low of any size and sign: int64 [...] twice."""
    return Wide(high + (low >> LOW_BITS), low & (2**LOW_BITS - 1))


def split(c: Value, k: int) -> tuple[Value, Array]:
    """(c div 2^k, c mod 2^k), k <= 16 for `Wide`."""
    if not isinstance(c, Wide):
        return c >> k, c & (2**k - 1)
    return Wide(c.high >> k, ((c.high & (2**k - 1)) << (LOW_BITS - k)) | (c.low >> k)), c.low & (2**k - 1)


def join(c: Value, digit: Array, k: int) -> Value:
    """c 2^k + digit, 0 <= digit < 2^k: the inverse of `split`."""
    if not isinstance(c, Wide):
        return (c << k) | digit
    return wide(c.high << k, (c.low << k) | digit)


def times(c: Value, n: Array, digit: Array) -> Value:
    """c n + digit, 0 <= digit < n."""
    if not isinstance(c, Wide):
        return c * n + digit
    return wide(c.high * n, c.low * n + digit)


def over(c: Value, n: Array, apart: Callable[..., Array]) -> tuple[Value, Array]:
    """(c div n, c mod n), floor division of a c that `times` made. apart(function, *arguments) stores what it computes:
    XLA would rather divide again for each array made from a quotient."""
    if not isinstance(c, Wide):
        return divide(c, n)
    low = apart(_low_quotient, c, n)
    digit = (c.low - low * n) & (2**LOW_BITS - 1)
    return Wide(divide(c.high, n)[0], low), digit


def _low_quotient(c: Wide, n: Array) -> Array:
    """By long division, half a limb at a time."""
    half = LOW_BITS // 2
    upper, rest = divide((divide(c.high, n)[1] << half) | (c.low >> half), n)
    lower, _ = divide((rest << half) | (c.low & (2**half - 1)), n)
    return (upper << half) | lower


def same(x: Value, y: Value) -> Array:
    """Entry by entry: bool [...]."""
    if isinstance(x, Scaled):
        return same(x.z, y.z)
    return (x.high == y.high) & (x.low == y.low) if isinstance(x, Wide) else x == y


def all_of(flags: Array) -> Array:
    """`flags.all()`, as a maximum of floats: of a reduction of bools XLA:CPU makes three kernels. bool [...] -> bool []."""
    return jnp.max((~flags).astype(jnp.float32).reshape(-1), initial=0) == 0
