"""Values of one int64 or of two (`Wide`), and the four integer operations that a reversible multiplication is made of.

Invariant: `join(*split(c, k), k) == c`, and `times(q, n, remainder(c, q, n)) == c` for `q = over(c, n)`.

A decay by n/d puts a digit of up to d quanta into a value. For a mean of squares that is too much: g^2 has twice the decades
of g. A second limb moves these quanta 44 bits down.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.exact.ratio import divide


LOW_BITS = 44
_MASK = 2**LOW_BITS - 1
WIDE_DENOMINATOR = 2**16  # the largest d: a remainder and a low limb, side by side, must stay below 2^62


class Wide(NamedTuple):
    """The integer high * 2^44 + low, 0 <= low < 2^44, |high| <= 2^62: two int64 arrays of one shape."""

    high: Array
    low: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.high.shape


Value = Any  # an int64 array, or `Wide`


def split(c: Value, k: int) -> tuple[Value, Array]:
    """(c div 2^k, c mod 2^k), k <= 44 for `Wide`."""
    if not isinstance(c, Wide):
        return c >> k, c & (2**k - 1)
    return Wide(c.high >> k, ((c.high & (2**k - 1)) << (LOW_BITS - k)) | (c.low >> k)), c.low & (2**k - 1)


def join(c: Value, digit: Array, k: int) -> Value:
    """c 2^k + digit, 0 <= digit < 2^k: the inverse of `split`."""
    if not isinstance(c, Wide):
        return (c << k) | digit
    return Wide((c.high << k) | (c.low >> (LOW_BITS - k)), ((c.low << k) & _MASK) | digit)


def times(c: Value, n: Array, digit: Array) -> Value:
    """c n + digit, 0 <= digit < n."""
    if not isinstance(c, Wide):
        return c * n + digit
    low = c.low * n + digit
    return Wide(c.high * n + (low >> LOW_BITS), low & _MASK)


def over(c: Value, n: Array) -> Value:
    """c div n, floor division."""
    if not isinstance(c, Wide):
        return divide(c, n)
    high = divide(c.high, n)
    return Wide(high, divide(((c.high - high * n) << LOW_BITS) | c.low, n))


def remainder(c: Value, quotient: Value, n: Array) -> Array:
    """c mod n of a c whose quotient is known."""
    if not isinstance(c, Wide):
        return c - quotient * n
    return (c.low - quotient.low * n) & _MASK


def same(x: Value, y: Value) -> Array:
    """Whether all elements agree: bool []."""
    return jnp.stack([jnp.all(a == b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)]).all()
