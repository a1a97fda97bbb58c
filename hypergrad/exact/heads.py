"""Algorithm 7 at every step, for decays of which each weight has its own: a head per parameter, and a stack of words.

Invariant: that of `hypergrad/exact/buffers.py`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._isolation import behind_branch
from hypergrad.exact.buffers import HEAD_BITS, WORD_BITS, Buffer, Mark, Schedule
from hypergrad.exact.fixed import Fixed
from hypergrad.exact.ratio import divide


class SpillEntry(NamedTuple):
    """What a step of `HeadsAndWords` must know beforehand: scalars, or arrays with a leading step axis."""

    n: Array  # int64, the leaf's smallest numerator
    spills: Array  # bool, whether a word leaves the heads
    slot: Array  # int32, the number of words spilled before
    step: Array | int = 0  # int32; the same for the whole batch under vmap, whatever else differs


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

    def capacity(self, digits: Heads) -> int | None:
        return None if digits.stack is None else digits.stack.shape[0] - 1

    def replaced(self, denominator: int) -> int:
        return denominator.bit_length() - 1

    def without_words(self, digits: Heads) -> Heads:
        return digits._replace(stack=None)

    def with_words(self, digits: Heads, like: Array, capacity: int) -> Heads:
        """The mirror of the head is there from the start."""
        stack = self.empty(like, capacity).stack
        assert stack is not None
        return digits._replace(stack=stack.at[0].set(digits.head.astype(jnp.uint16)))

    def multiply_by(self, digits: Heads, value: Fixed, n: Array, denominator: int, entry: SpillEntry) -> tuple[Heads, Fixed]:
        k = denominator.bit_length() - 1
        i = behind_branch(entry.step >= 0, functools.partial(_next_head, k), digits.head, value, n, entry.spills)
        value, digit = value.split_nearest(k)
        digit = _mod(digit - i.astype(jnp.int64) * n, k)
        value = value.times(n, value.near(digit, n))  # l. 4-5: c = c div d, c = c n + i mod n
        return _mirror(Heads(i, digits.stack), entry), value

    def divide_by(self, digits: Heads, value: Fixed, n: Array, denominator: int, entry: SpillEntry) -> tuple[Heads, Fixed]:
        k, multiple = denominator.bit_length() - 1, digits.head.astype(jnp.int64) * n
        value, digit = value.over(n, functools.partial(behind_branch, entry.step >= 0))
        value = value.join(value.near(_mod(multiple + digit, k), denominator), k)  # l. 4-5
        i = (multiple + _mod(value.split(k)[1] - multiple, k)) >> k  # i = i n + c mod n, i = i div d
        return _unspill(Heads(i.astype(jnp.uint32), digits.stack), entry), value

    def is_empty(self, digits: Heads) -> Array:
        return digits.head == 0

    def length(self, digits: Heads, words: Array) -> Array:
        return WORD_BITS * words + jnp.mean((HEAD_BITS - jax.lax.clz(digits.head)).astype(jnp.float32))

    def start(self) -> Mark:
        return Mark(jnp.int64(0), jnp.int32(0))

    def schedule(self, n: Array, denominator: int, before: Mark | None = None) -> Schedule:
        def body(mark: Mark, n: Array) -> tuple[Mark, SpillEntry]:
            after, spills = _next_bound(*mark, n, denominator, jnp.where)
            return Mark(*after), SpillEntry(n, spills, mark.words)

        end, entries = jax.lax.scan(body, self.start() if before is None else before, n)
        return Schedule(entries._replace(step=jnp.arange(n.shape[0], dtype=jnp.int32)), end)

    def residual_bits(self, mark: Mark) -> Array:
        return jnp.log2(mark.level.astype(jnp.float32) + 1)

    def words_needed(self, n: np.ndarray, denominator: int) -> int:
        state = (0, 0)
        for numerator in np.asarray(n).tolist():
            state, _ = _next_bound(*state, numerator, denominator, lambda c, x, y: x if c else y)
        return state[1]

    def most_words(self, steps: int, bits: float) -> int:
        """From a full head. b = bound + 1 grows by d/n and at most 1 a step, and a spill leaves b / 2^16 + 1 of it."""
        rounding = 2.0**-15 + math.log2(1 + 2 ** (bits - WORD_BITS))
        return int((HEAD_BITS + steps * (bits + rounding)) / WORD_BITS) + 1


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
