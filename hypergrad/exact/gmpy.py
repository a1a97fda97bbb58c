"""Exactly reversible multiplication by n/d with one arbitrary-precision integer per parameter (thesis, Algorithm 7).

Invariant: `divide_by(*multiply_by(buffer, c, ...), ...) == (buffer, c)`, for any integers n, d >= 1 and any c.

The reference for the buffers on the device: the algorithm as printed, without capacity or word size. It equals the stack of
words bit for bit, and heads with words until the first spill (after it, a device head lacks its low digits). Host only.
"""

import dataclasses
from typing import Any

import gmpy2
import jax
import jax.numpy as jnp
import numpy as np

from hypergrad.exact.buffer import WORD_BITS
from hypergrad.exact.deferred import Deferral
from hypergrad.exact.limbs import LOW_BITS, Scaled, Value, Wide


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Digits:
    """One mpz per parameter. A pytree without leaves: Python objects travel beside JAX's arrays, not among them."""

    i: np.ndarray


def empty_buffer(shape: tuple[int, ...], capacity: int | None = None) -> Digits:
    """All zero; `capacity` is ignored: it grows as it must."""
    del capacity
    return Digits(np.full(shape, gmpy2.mpz(0), dtype=object))


def is_empty(buffer: Digits) -> np.ndarray:
    """Parameter by parameter: bool [...]."""
    return np.asarray(buffer.i == 0, bool)


def length(buffer: Digits, words: Any) -> float:
    """Bits that the integers are long, their mean; `words` is ignored: they are in one piece."""
    del words
    return float(np.mean([int(x).bit_length() for x in buffer.i.flat]))


def multiply_by(buffer: Digits, c: Value, n: Any, denominator: int, turn: Any = None) -> tuple[Digits, Value]:
    """c <- c n/d, the digit lost kept in the buffer (Algorithm 7): int64 [...] or `Wide` -> the same."""
    del turn
    i, v, n, d = buffer.i, _big(c), _big(n), denominator
    i = i * d + v % d  # l. 2-3
    v = v // d  # l. 4
    v = v * n + i % n  # l. 5-6
    i = i // n  # l. 7
    return Digits(_as_objects(i)), _as_int64(v, c)


def divide_by(buffer: Digits, c: Value, n: Any, denominator: int, turn: Any = None) -> tuple[Digits, Value]:
    """The inverse of `multiply_by`: the same lines with n and d swapped."""
    del turn
    i, v, n, d = buffer.i, _big(c), _big(n), denominator
    i = i * n + v % n
    v = v // n
    v = v * d + i % d
    i = i // d
    return Digits(_as_objects(i)), _as_int64(v, c)


def multiply_waiting(buffer: Digits, x: Scaled, n: Any, denominator: int, turn: Deferral) -> tuple[Digits, Scaled]:
    """The same for a decay that waits (exact/deferred.py): by 1/2^16, at the steps where the device gives up a word."""
    del n, denominator
    buffer, z = multiply_by(buffer, x.z, 1, 2**WORD_BITS) if turn.spills else (buffer, x.z)
    return buffer, Scaled(z, turn.after)


def divide_waiting(buffer: Digits, x: Scaled, n: Any, denominator: int, turn: Deferral) -> tuple[Digits, Scaled]:
    """The inverse of `multiply_waiting`."""
    del n, denominator
    buffer, z = divide_by(buffer, x.z, 1, 2**WORD_BITS) if turn.spills else (buffer, x.z)
    return buffer, Scaled(z, turn.before)


def _big(x: Any) -> np.ndarray:
    """An object array of mpz, whose operators are exact."""
    if isinstance(x, Wide):
        return _big(x.high) * 2**LOW_BITS + _big(x.low)
    x = np.asarray(x)
    return _as_objects(np.frompyfunc(lambda v: gmpy2.mpz(int(v)), 1, 1)(x))


def _as_objects(x: Any) -> np.ndarray:
    # NumPy turns 0-d object results into bare scalars.
    return np.asarray(x, dtype=object)


def _as_int64(c: Any, like: Value) -> Value:
    if isinstance(like, Wide):
        return Wide(_as_int64(c // 2**LOW_BITS, like.high), _as_int64(c % 2**LOW_BITS, like.low))
    return jnp.asarray(_as_objects(c).astype(np.int64))
