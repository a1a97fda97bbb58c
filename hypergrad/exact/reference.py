"""Exactly reversible multiplication by n/d with one arbitrary-precision integer per parameter (thesis, Algorithm 7).

Invariant: `divide_by(*multiply_by(digits, value, ...), ...) == (digits, value)`, for any integers n, d >= 1 and any value.

The reference for the buffers on the device: the algorithm as printed, without capacity or word size. It equals the stack of
words bit for bit, and heads with words until the first spill (after it, a device head lacks its low digits). Host only.
"""

import dataclasses
from typing import Any

import gmpy2
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.exact.buffers import WORD_BITS, Buffer, Mark, Schedule
from hypergrad.exact.deferred import Deferred
from hypergrad.exact.fixed import LOW_BITS, Fixed
from hypergrad.exact.heads import HeadsAndWords


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Digits:
    """One mpz per parameter. A pytree without leaves: Python objects travel beside JAX's arrays, not among them."""

    i: np.ndarray


@dataclasses.dataclass(frozen=True)
class Reference(Buffer):
    """In place of `HeadsAndWords`, or of `Deferred`: then by 1/2^16, at the steps where the device gives up a word."""

    deferred: bool = False

    def empty(self, like: Any, capacity: int | None) -> Digits:
        """`capacity` is ignored: it grows as it must."""
        return Digits(np.full(like.shape, gmpy2.mpz(0), dtype=object))

    def multiply_by(self, digits: Digits, value: Fixed, n: Any, denominator: int, entry: Any) -> tuple[Digits, Fixed]:
        i, v, (n, d) = digits.i, _big(value), self._ratio(n, denominator, entry)
        div, near = _nearest(value)
        i = i * d + v % d  # l. 2-3
        v = div(v, d)  # l. 4
        v = v * n + near(i % n, n)  # l. 5-6
        i = i // n  # l. 7
        return Digits(np.asarray(i, object)), _limbs(v, value, entry.after if self.deferred else None)

    def divide_by(self, digits: Digits, value: Fixed, n: Any, denominator: int, entry: Any) -> tuple[Digits, Fixed]:
        """The inverse of `multiply_by`: the same lines with n and d swapped."""
        i, v, (n, d) = digits.i, _big(value), self._ratio(n, denominator, entry)
        div, near = _nearest(value)
        i = i * n + v % n
        v = div(v, n)
        v = v * d + near(i % d, d)
        i = i // d
        return Digits(np.asarray(i, object)), _limbs(v, value, entry.before if self.deferred else None)

    def _ratio(self, n: Any, denominator: int, entry: Any) -> tuple[np.ndarray, int]:
        if not self.deferred:
            return _objects(n), denominator
        return _objects(1), 2**WORD_BITS if entry.spills else 1  # by 1/1 nothing changes

    def capacity(self, digits: Digits) -> None:
        return None

    def replaced(self, denominator: int) -> int:
        return self._device.replaced(denominator)

    def without_words(self, digits: Digits) -> Digits:
        return digits

    def with_words(self, digits: Digits, like: Any, capacity: int) -> Digits:
        return digits

    def is_empty(self, digits: Digits) -> np.ndarray:
        return np.asarray(digits.i == 0, bool)

    def length(self, digits: Digits, words: Any) -> float:
        """`words` is ignored: they are in one piece."""
        return float(np.mean([int(x).bit_length() for x in digits.i.flat]))

    @property
    def _device(self) -> Buffer:
        return Deferred() if self.deferred else HeadsAndWords()

    def hold(self, value: Fixed) -> Fixed:
        return self._device.hold(value)

    def start(self) -> Mark:
        return self._device.start()

    def schedule(self, n: Any, denominator: int, before: Mark | None = None) -> Schedule:
        return self._device.schedule(n, denominator, before)

    def residual_bits(self, mark: Mark) -> Array:
        return self._device.residual_bits(mark)

    def words_needed(self, n: np.ndarray, denominator: int) -> int:
        return self._device.words_needed(n, denominator)

    def most_words(self, steps: int, bits: float) -> int:
        return self._device.most_words(steps, bits)


def _nearest(value: Fixed) -> tuple[Any, Any]:
    """(v, n) -> v div n, and (v mod n, n) -> what is left of v, as `hypergrad/exact/buffers.py` says; of two limbs rounded
    down."""
    if value.low is not None:
        return lambda v, n: v // n, lambda digit, n: digit
    return lambda v, n: (v + n // 2) // n, lambda digit, n: (digit + n // 2) % n - n // 2


def _big(x: Fixed) -> np.ndarray:
    return _objects(x.high) if x.low is None else _objects(x.high) * 2**LOW_BITS + _objects(x.low)


def _limbs(v: Any, like: Fixed, scale: Any) -> Fixed:
    """The inverse of `_big`."""
    as_int64 = lambda x: jnp.asarray(np.asarray(x, object).astype(np.int64))  # noqa: E731
    if like.low is None:
        return Fixed(as_int64(v), None, scale)
    return Fixed(as_int64(v // 2**LOW_BITS), as_int64(v % 2**LOW_BITS), scale)


def _objects(x: Any) -> np.ndarray:
    """An object array of mpz, whose operators are exact. NumPy turns 0-d results into bare scalars."""
    return np.asarray(np.frompyfunc(lambda v: gmpy2.mpz(int(v)), 1, 1)(np.asarray(x)), object)
