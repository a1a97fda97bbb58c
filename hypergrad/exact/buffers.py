"""Information buffers on the device: exactly reversible multiplication by n/d, d a power of two (thesis, Algorithm 7).

Invariant: `buffer.divide_by(*buffer.multiply_by(digits, value, ...), ...)` is (digits, value) again, bit for bit, below the
top of the stack, whatever integers the value is.

The buffer of Algorithm 7 is one unbounded integer i per parameter. Here its digits leave as 16-bit words, for a stack that
all entries of a leaf share: when they leave depends on n_1..n_T alone. So the schedule is computed before the loop, and both
passes read it. One word a step is enough for n >= d / 2^16.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._isolation import behind_branch
from hypergrad.exact.fixed import Fixed
from hypergrad.exact.ratio import divide


WORD_BITS = 16
HEAD_BITS = 32
PUBLIC_WORD_BITS = 32  # what users count words by
FULL_SCALE = 2.0**WORD_BITS  # of a value that no decay has reached


class Schedule(NamedTuple):
    """When the buffer of one leaf spills, and what it holds at the end."""

    entries: Any  # `SpillEntry` or `DeferredEntry`, of arrays [steps]
    words: Array  # int32 []: words spilled per parameter
    residual_bits: Array  # float []: bits that wait to become words


@dataclasses.dataclass(frozen=True)
class Buffer(abc.ABC):
    """Where the digits go that a multiplication by n/d would lose. Stateless: the digits come in and go out."""

    @abc.abstractmethod
    def empty(self, like: Array, capacity: int | None) -> Any:
        """Digits of a value of this shape: `capacity` words per parameter; None drops them (a run not to be reversed)."""

    @abc.abstractmethod
    def multiply_by(self, digits: Any, value: Fixed, n: Any, denominator: int, entry: Any) -> tuple[Any, Fixed]:
        """value <- value n/d, the digit lost kept: int64 [] or [...], max(1, d / 2^16) <= n <= d."""

    @abc.abstractmethod
    def divide_by(self, digits: Any, value: Fixed, n: Any, denominator: int, entry: Any) -> tuple[Any, Fixed]:
        """The inverse of `multiply_by`."""

    @abc.abstractmethod
    def is_empty(self, digits: Any) -> Any:
        """bool, of the parameters' shape or of all."""

    @abc.abstractmethod
    def length(self, digits: Any, words: Any) -> Any:
        """Bits that the integers of Algorithm 7 are long, their mean. words: spilled so far, int32 []."""

    def hold(self, value: Fixed) -> Fixed:
        """An integer of the grid as it is multiplied."""
        return value

    @abc.abstractmethod
    def schedule(self, n: Array, denominator: int) -> Schedule:
        """int64 [steps], a leaf's smallest numerator at each step (a bound for the others)."""

    @abc.abstractmethod
    def words_needed(self, n: np.ndarray, denominator: int) -> int:
        """`schedule(n, denominator).words` for concrete numerators, in Python's numbers."""


class SpillEntry(NamedTuple):
    """What a step of `HeadsAndWords` must know beforehand: scalars, or arrays with a leading step axis."""

    n: Array  # int64, the leaf's smallest numerator
    spills: Array  # bool, whether a word leaves the heads
    slot: Array  # int32, the number of words spilled before
    step: Array | int = 0  # int32; the same for the whole batch under vmap, whatever else differs

    def unslotted(self) -> "SpillEntry":
        """The same for a stack of one word."""
        return self._replace(slot=jnp.zeros_like(self.slot))


class Heads(NamedTuple):
    """Lost digits of one leaf of one link."""

    head: Array  # uint32, the parameter's shape
    stack: Array | None  # uint16 [capacity + 1, ...], one slot for the mirror; None drops the words


class HeadsAndWords(Buffer):
    """Algorithm 7 at every step, for decays of which each weight has its own.

    The last digits of i are in a head (uint32), all others in the stack, whose top always mirrors the low 16 bits of the
    head: to spill a word is to shift it out of the head and to leave its mirror behind.

        grown(bound) = (bound d + d - 1) div n      the largest value that any head of the leaf can hold after this step
        if grown(bound) >= 2^32: spill, bound <- bound div 2^16
        bound <- grown(bound)

    What is left after a spill is below 2^16, and (2^16 - 1) d + d - 1 < 2^32 n.
    """

    def empty(self, like: Array, capacity: int | None) -> Heads:
        stack = None if capacity is None else jnp.zeros((capacity + 1, *like.shape), jnp.uint16)
        return Heads(jnp.zeros_like(like, dtype=jnp.uint32), stack)

    def multiply_by(self, digits: Heads, value: Fixed, n: Array, denominator: int, entry: SpillEntry) -> tuple[Heads, Fixed]:
        k = denominator.bit_length() - 1
        i = behind_branch(entry.step >= 0, functools.partial(_next_head, k), digits.head, value, n, entry.spills)
        value, digit = value.split(k)
        value = value.times(n, _mod(digit - i.astype(jnp.int64) * n, k))  # l. 4-5: c = c div d, c = c n + i mod n
        return _mirror(Heads(i, digits.stack), entry), value

    def divide_by(self, digits: Heads, value: Fixed, n: Array, denominator: int, entry: SpillEntry) -> tuple[Heads, Fixed]:
        k, multiple = denominator.bit_length() - 1, digits.head.astype(jnp.int64) * n
        value, digit = value.over(n, functools.partial(behind_branch, entry.step >= 0))
        value = value.join(_mod(multiple + digit, k), k)  # l. 4-5
        i = (multiple + _mod(value.split(k)[1] - multiple, k)) >> k  # i = i n + c mod n, i = i div d
        return _unspill(Heads(i.astype(jnp.uint32), digits.stack), entry), value

    def is_empty(self, digits: Heads) -> Array:
        return digits.head == 0

    def length(self, digits: Heads, words: Array) -> Array:
        return WORD_BITS * words + jnp.mean((HEAD_BITS - jax.lax.clz(digits.head)).astype(jnp.float32))

    def schedule(self, n: Array, denominator: int) -> Schedule:
        def body(carry: tuple[Array, Array], n: Array) -> tuple[tuple[Array, Array], SpillEntry]:
            (bound, slot), spills = _next_bound(*carry, n, denominator, jnp.where)
            return (bound, slot), SpillEntry(n, spills, carry[1])

        (bound, words), entries = jax.lax.scan(body, (jnp.int64(0), jnp.int32(0)), n)
        residual_bits = jnp.log2(bound.astype(jnp.float32) + 1)
        return Schedule(entries._replace(step=jnp.arange(n.shape[0], dtype=jnp.int32)), words, residual_bits)

    def words_needed(self, n: np.ndarray, denominator: int) -> int:
        state = (0, 0)
        for numerator in np.asarray(n).tolist():
            state, _ = _next_bound(*state, numerator, denominator, lambda c, x, y: x if c else y)
        return state[1]


def _next_head(k: int, i: Array, c: Fixed, n: Array, spills: Array) -> Array:
    """l. 2, 3, 6: i = i d + c mod d, i = i div n."""
    i = jnp.where(spills, i >> WORD_BITS, i)  # the word is in the stack already
    return divide((i.astype(jnp.int64) << k) | c.split(k)[1], n)[0].astype(jnp.uint32)


def _mod(x: Array, k: int) -> Array:
    """x mod 2^k. A remainder by n <= 2^k is known from its last k bits: those of what it is the difference of."""
    return x & (2**k - 1)


def _mirror(digits: Heads, entry: SpillEntry) -> Heads:
    # Written at every step, whether or not the next one spills: cheaper than a branch, above all under vmap.
    if digits.stack is None:
        return digits
    top = entry.slot + entry.spills
    return digits._replace(stack=jax.lax.dynamic_update_index_in_dim(digits.stack, digits.head.astype(jnp.uint16), top, 0))


def _unspill(digits: Heads, entry: SpillEntry) -> Heads:
    """The inverse of the shift in `_next_head`, by the mirror."""
    word = jax.lax.dynamic_index_in_dim(digits.stack, entry.slot, 0, keepdims=False)
    head = jnp.where(entry.spills, (digits.head << WORD_BITS) | word.astype(jnp.uint32), digits.head)
    return digits._replace(head=head)


def _next_bound(bound: Any, slot: Any, n: Any, denominator: int, where: Callable[..., Any]) -> tuple[Any, Any]:
    """((bound, slot) after a multiplication by n/d, whether it spilled first); on arrays or on Python integers."""
    grown = lambda bound: (bound * denominator + denominator - 1) // n  # noqa: E731
    spills = grown(bound) >= 2**HEAD_BITS
    bound, slot = where(spills, bound >> WORD_BITS, bound), where(spills, slot + 1, slot)
    return (grown(bound), slot), spills


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

    def unslotted(self) -> "DeferredEntry":
        """The same for a stack of one word."""
        return DeferredEntry(self.row.at[..., 4].set(self.row[..., 4] % 1))


class Words(NamedTuple):
    """Lost digits of one leaf of one link."""

    stack: Any  # uint16 [capacity, ...]; None drops the words


class Deferred(Buffer):
    """Decays that fall on a scale, and reach the integers once they have come to 16 bits: for those that a leaf shares.

    The integers z are multiplied by 1/2^16 then, which is Algorithm 7 with n = 1: its lines 5 to 7 change nothing, and the
    digit that it keeps is a whole word. So the digits are the stack alone, and most steps touch neither.

        fallen = scale n / d
        if fallen < 1: a word leaves, scale <- 2^16 fallen; else scale <- fallen

    1 <= scale <= 2^16 always: a product in float64, the same in every pass. n and d are in the entry: those of the schedule.
    """

    def empty(self, like: Array, capacity: int | None) -> Words:
        return Words(None if capacity is None else jnp.zeros((capacity, *like.shape), jnp.uint16))

    def multiply_by(
        self, digits: Words, value: Fixed, n: Any, denominator: int, entry: DeferredEntry
    ) -> tuple[Words, Fixed]:
        """By the scale, and once that has fallen far enough: i = i 2^16 + z mod 2^16, z = z div 2^16."""
        z, word = value.split(WORD_BITS)
        digits = _put(digits, word.astype(jnp.uint16), entry)
        return digits, z.where(entry.spills, value)._replace(scale=entry.after)

    def divide_by(self, digits: Words, value: Fixed, n: Any, denominator: int, entry: DeferredEntry) -> tuple[Words, Fixed]:
        """The inverse of `multiply_by`: z = z 2^16 + i mod 2^16, i = i div 2^16."""
        z = value.join(_top(digits, entry).astype(jnp.int64), WORD_BITS)
        return digits, z.where(entry.spills, value)._replace(scale=entry.before)

    def is_empty(self, digits: Words) -> Array:
        """The schedule takes as many words as it gave: nothing else is left to ask. bool []."""
        return jnp.bool_(True)

    def length(self, digits: Words, words: Array) -> Array:
        return WORD_BITS * words

    def hold(self, value: Fixed) -> Fixed:
        """16 bits coarser, at the full scale."""
        return value._replace(scale=jnp.asarray([FULL_SCALE, 1 / FULL_SCALE]))

    @functools.partial(jax.jit, static_argnames=("self", "denominator"))
    def schedule(self, n: Array, denominator: int) -> Schedule:
        def body(carry: tuple[Array, Array], n: Array) -> tuple[tuple[Array, Array], DeferredEntry]:
            scale, slot = carry
            after, left = _next_scale(scale, slot, n.astype(jnp.float64), denominator, jnp.where)
            return (after, left), DeferredEntry.packed(after, scale, left, slot)

        (last, words), entries = jax.lax.scan(body, (jnp.float64(FULL_SCALE), jnp.int32(0)), n)
        return Schedule(entries, words, jnp.log2(FULL_SCALE / last))

    def words_needed(self, n: np.ndarray, denominator: int) -> int:
        scale, words = FULL_SCALE, 0
        for numerator in np.asarray(n).tolist():
            scale, words = _next_scale(scale, words, float(numerator), denominator, lambda c, x, y: x if c else y)
        return words


def _put(digits: Words, word: Array, entry: DeferredEntry) -> Words:
    if digits.stack is None or not digits.stack.shape[0]:
        return digits
    word = jnp.where(entry.spills, word, _top(digits, entry))
    return Words(jax.lax.dynamic_update_index_in_dim(digits.stack, word, entry.slot, 0))


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
