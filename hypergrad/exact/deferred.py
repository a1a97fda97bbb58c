"""Decays that wait: x = z scale, a decay falls on the scale, and reaches the integers z once it has come to 16 bits.

Invariant: `divide_by(*multiply_by(words, x, ...), ...)` is (words, x) again, bit for bit, below the top of the stack.

For decays that all entries of a leaf share. The integers are multiplied by 1/2^16 then, which is Algorithm 7 with n = 1: its
lines 5 to 7 change nothing, and the digit that it keeps is a whole word. So the buffer is the stack of words alone, and most
steps touch neither. When a word leaves, and every scale, depends on n_1..n_T alone:

    fallen = scale n / d
    if fallen < 1: a word leaves, scale <- 2^16 fallen; else scale <- fallen

One word a step is enough for n >= d / 2^16, and 1 <= scale <= 2^16 always: a product in float64, the same in every pass.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.exact.buffer import WORD_BITS, Schedule
from hypergrad.exact.limbs import Scaled, Value, join, split


FULL = 2.0**WORD_BITS  # the scale that nothing has fallen from


class Deferral(NamedTuple):
    """What a step must know beforehand, or all steps with a leading axis.

    In one array, since XLA compiles two kernels for each that a loop writes.
    """

    row: Array  # float64 [5]: `after`, `before`, and `slot`, plus a half at a step that `spills`

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

    def unslotted(self) -> "Deferral":
        """The same for a stack of one word."""
        return Deferral(self.row.at[..., 4].set(self.row[..., 4] % 1))


class Words(NamedTuple):
    """Lost digits of one leaf of one link."""

    stack: Any  # uint16 [capacity, ...]; None drops the words (a run that will not be reversed)


def hold(z: Value) -> Scaled:
    """An integer of the grid, 16 bits coarser, at the full scale."""
    return Scaled(z, jnp.asarray([FULL, 1 / FULL]))


def empty_words(shape: tuple[int, ...], capacity: int | None) -> Words:
    """`capacity`: words per parameter."""
    return Words(None if capacity is None else jnp.zeros((capacity, *shape), jnp.uint16))


def is_empty(words: Words) -> Array:
    """The schedule takes as many words as it gave: nothing else is left to ask."""
    del words
    return jnp.bool_(True)


def multiply_by(words: Words, x: Scaled, n: Any, denominator: int, turn: Deferral) -> tuple[Words, Scaled]:
    """x <- x n/d by the scale, and once that has fallen far enough by Algorithm 7: i = i 2^16 + z mod 2^16, z = z div 2^16.

    n and d are those of the schedule that the turn is of.
    """
    del n, denominator
    z, word = split(x.z, WORD_BITS)
    words = _put(words, word.astype(jnp.uint16), turn)
    return words, Scaled(_either(turn.spills, z, x.z), turn.after)


def divide_by(words: Words, x: Scaled, n: Any, denominator: int, turn: Deferral) -> tuple[Words, Scaled]:
    """The inverse of `multiply_by`: z = z 2^16 + i mod 2^16, i = i div 2^16."""
    del n, denominator
    z = join(x.z, _top(words, turn).astype(jnp.int64), WORD_BITS)
    return words, Scaled(_either(turn.spills, z, x.z), turn.before)


def _top(words: Words, turn: Deferral) -> Array:
    """The word that is next to return; zeros where there is no room for any (the status says so if one was lost)."""
    if not words.stack.shape[0]:
        return jnp.zeros(words.stack.shape[1:], words.stack.dtype)
    return jax.lax.dynamic_index_in_dim(words.stack, turn.slot, 0, keepdims=False)


def _put(words: Words, word: Array, turn: Deferral) -> Words:
    if words.stack is None or not words.stack.shape[0]:
        return words
    word = jnp.where(turn.spills, word, _top(words, turn))
    return Words(jax.lax.dynamic_update_index_in_dim(words.stack, word, turn.slot, 0))


def _either(taken: Array, x: Value, y: Value) -> Value:
    return jax.tree.map(lambda a, b: jnp.where(taken, a, b), x, y)


def length(words: Words, spilled: Array) -> Array:
    """Bits of the buffer."""
    del words
    return WORD_BITS * spilled


@functools.partial(jax.jit, static_argnames="denominator")
def schedule(n: Array, denominator: int) -> Schedule:
    """Scales and spills of a leaf: int64 [steps]."""

    def body(carry: tuple[Array, Array], n: Array) -> tuple[tuple[Array, Array], Deferral]:
        scale, slot = carry
        after, left, spills = _fallen(scale, slot, n.astype(jnp.float64), denominator, jnp.where)
        row = jnp.stack([after, 1 / after, scale, 1 / scale, (slot + left) / 2])
        return (after, left), Deferral(row)

    (last, words), turns = jax.lax.scan(body, (jnp.float64(FULL), jnp.int32(0)), n)
    return Schedule(turns, words, jnp.log2(FULL / last))


def words_needed(n: np.ndarray, denominator: int) -> int:
    """`schedule(n, denominator).words` for concrete numerators, in Python floats."""
    scale, words = FULL, 0
    for numerator in np.asarray(n).tolist():
        scale, words, _ = _fallen(scale, words, float(numerator), denominator, lambda c, x, y: x if c else y)
    return words


def _fallen(scale: Any, words: Any, n: Any, denominator: int, where: Any) -> tuple[Any, Any, Any]:
    """(scale and words after a multiplication by n/d, whether a word left); on arrays or on Python floats."""
    fallen = scale * n * (1 / denominator)
    spills = fallen < 1
    return where(spills, fallen * FULL, fallen), where(spills, words + 1, words), spills
