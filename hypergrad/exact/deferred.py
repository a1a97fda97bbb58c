"""Decays that a whole leaf shares: they fall on a scale, and reach the integers a word at a time.

Invariant: that of `hypergrad/exact/buffers.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.exact.buffers import WORD_BITS, Buffer, Mark, Schedule
from hypergrad.exact.fixed import Fixed


FULL_SCALE = 2.0**WORD_BITS  # of a value that no decay has reached


class DeferredEntry(NamedTuple):
    """What a step of `Deferred` must know beforehand. In one array: XLA compiles two kernels for each that a loop writes."""

    row: Array  # float64 [5] or [steps, 5], by `packed`: `after`, `before`, and `slot`, plus a half if the step `spills`

    @staticmethod
    def packed(after: Array, before: Array, slot_after: Array, slot_before: Array) -> "DeferredEntry":
        """Scales, float64 [], and how many words have left: int32 []."""
        return DeferredEntry(jnp.stack([after, 1 / after, before, 1 / before, (slot_before + slot_after) / 2]))

    @property
    def after(self) -> Array:
        """The scale that the step leaves, and its inverse: float64 [2]."""
        return self.row[..., :2]

    @property
    def before(self) -> Array:
        """Those that it finds."""
        return self.row[..., 2:4]

    @property
    def spills(self) -> Array:
        """Whether a word leaves the integers: bool []."""
        return self.row[..., 4] % 1 > 0

    @property
    def slot(self) -> Array:
        """The number of words that have left before: int32 []."""
        return self.row[..., 4].astype(jnp.int32)


class Words(NamedTuple):
    """Lost digits of one leaf of one link."""

    stack: Any  # uint16 [capacity, ...]; None drops the words


class Deferred(Buffer):
    """Decays that fall on a scale, and reach the integers once they have come to 16 bits: for those that a leaf shares.

    The integers z are multiplied by 1/2^16 then, which is Algorithm 7 with n = 1: its lines 5 to 7 change nothing, and the
    digit that it keeps is a whole word. So the digits are the stack alone, and most steps touch neither. z is rounded to the
    nearest, and the word the rest, of either sign.

        fallen = scale n / d
        if fallen < 1: a word leaves, scale <- 2^16 fallen; else scale <- fallen

    1 <= scale <= 2^16 always: a product in float64, the same in every pass. n and d are in the entry: those of the schedule.
    """

    def empty(self, like: Array, capacity: int | None) -> Words:
        return Words(None if capacity is None else jnp.zeros((capacity, *like.shape), jnp.uint16))

    def capacity(self, digits: Words) -> int | None:
        return None if digits.stack is None else digits.stack.shape[0]

    def replaced(self, denominator: int) -> int:
        return WORD_BITS  # at the full scale

    def without_words(self, digits: Words) -> Words:
        return Words(None)

    def with_words(self, digits: Words, like: Array, capacity: int) -> Words:
        return self.empty(like, capacity)

    def multiply_by(
        self, digits: Words, value: Fixed, n: Any, denominator: int, entry: DeferredEntry
    ) -> tuple[Words, Fixed]:
        """By the scale, and once that has fallen far enough: z = q 2^16 + r, i = i 2^16 + r mod 2^16, z = q."""
        z, word = value.split_nearest(WORD_BITS)
        digits = _put(digits, word.astype(jnp.uint16), entry)
        z = z.where(entry.spills, value)._replace(scale=entry.after)
        if digits.stack is not None and digits.stack.shape[0]:
            z = z._replace(high=_after(entry, z.high, digits.stack[0]))
        return digits, z

    def divide_by(self, digits: Words, value: Fixed, n: Any, denominator: int, entry: DeferredEntry) -> tuple[Words, Fixed]:
        """The inverse of `multiply_by`: r = i mod 2^16 of either sign, i = i div 2^16, z = z 2^16 + r."""
        word = _top(digits, entry)
        z = value.join((word if value.low is not None else word.astype(jnp.int16)).astype(jnp.int64), WORD_BITS)
        z = z.where(entry.spills, value)._replace(scale=entry.before)
        return digits, z if z.low is None else z._replace(low=_after(entry, z.low, z.high))

    def is_empty(self, digits: Words) -> Array:
        """The schedule takes as many words as it gave: nothing else is left to ask. bool []."""
        return jnp.bool_(True)

    def length(self, digits: Words, words: Array) -> Array:
        return WORD_BITS * words

    def hold(self, value: Fixed) -> Fixed:
        """16 bits coarser, at the full scale."""
        return value._replace(scale=jnp.asarray([FULL_SCALE, 1 / FULL_SCALE]))

    def start(self) -> Mark:
        return Mark(jnp.float64(FULL_SCALE), jnp.int32(0))

    @functools.partial(jax.jit, static_argnames=("self", "denominator"))
    def schedule(self, n: Array, denominator: int, before: Mark | None = None) -> Schedule:
        def body(mark: Mark, n: Array) -> tuple[Mark, DeferredEntry]:
            after = Mark(*_next_scale(*mark, n.astype(jnp.float64), denominator, jnp.where))
            return after, DeferredEntry.packed(after.level, mark.level, after.words, mark.words)

        end, entries = jax.lax.scan(body, self.start() if before is None else before, n)
        return Schedule(entries, end)

    def residual_bits(self, mark: Mark) -> Array:
        return jnp.log2(FULL_SCALE / mark.level)

    def words_needed(self, n: np.ndarray, denominator: int) -> int:
        scale, words = FULL_SCALE, 0
        for numerator in np.asarray(n).tolist():
            scale, words = _next_scale(scale, words, float(numerator), denominator, lambda c, x, y: x if c else y)
        return words

    def most_words(self, steps: int, bits: float) -> int:
        """The scale loses steps x bits of them, and begins with 16 at most."""
        return int(steps * bits / WORD_BITS * (1 + 2.0**-20)) + 1


def _put(digits: Words, word: Array, entry: DeferredEntry) -> Words:
    if digits.stack is None or not digits.stack.shape[0]:
        return digits
    word = jnp.where(entry.spills, word, _top(digits, entry))
    return Words(jax.lax.dynamic_update_index_in_dim(digits.stack, word, entry.slot, 0))


def _after(entry: DeferredEntry, x: Array, other: Array) -> Array:
    """x, made when the other has been: then it may overwrite what the other is made of. XLA copied that at every step."""
    return jnp.where(entry.slot >= 0, x, other.astype(x.dtype))


def _top(digits: Words, entry: DeferredEntry) -> Array:
    """The word that is next to return; zeros where there is no room for any (the status says so if one was lost)."""
    if not digits.stack.shape[0]:
        return jnp.zeros(digits.stack.shape[1:], digits.stack.dtype)
    return jax.lax.dynamic_index_in_dim(digits.stack, entry.slot, 0, keepdims=False)


def _next_scale(scale: Any, words: Any, n: Any, denominator: int, where: Callable[..., Any]) -> tuple[Any, Any]:
    """The scale, and how many words have left, after a multiplication by n/d; on arrays or on Python floats."""
    fallen = scale * n * (1 / denominator)
    spills = fallen < 1
    return where(spills, fallen * FULL_SCALE, fallen), where(spills, words + 1, words)
