"""Information buffers on the device: exactly reversible multiplication by n/d, d a power of two (thesis, Algorithm 7).

Invariant: `buffer.divide_by(*buffer.multiply_by(digits, value, ...), ...)` is (digits, value) again, bit for bit, below the
top of the stack, whatever integers the value is.

The buffer of Algorithm 7 is one unbounded integer i per parameter. Here its digits leave as 16-bit words, for a stack that
all entries of a leaf share: when they leave depends on n_1..n_T alone. So the schedule is computed before the loop, and both
passes read it. One word a step is enough for n >= d / 2^16.

Of values of one limb c div n is the nearest integer, and a digit x = c mod n of them stands for x or x - n, whichever leaves
-(n div 2) <= . < n - n div 2: rounded down, what falls to nothing from below would stop at -1. i div n is rounded down.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from hypergrad.exact.fixed import Fixed


WORD_BITS = 16
HEAD_BITS = 32
PUBLIC_WORD_BITS = 32  # what users count words by


class Mark(NamedTuple):
    """Where a schedule stands before a step: what the entries from there on follow from."""

    level: Array  # of heads, the most that one can hold, int64 []; of a deferred decay, its scale, float64 []
    words: Array  # int32 []: spilled so far per parameter

    def restarted(self) -> "Mark":
        """With a stack that is empty here."""
        return self._replace(words=self.words * 0)


class Schedule(NamedTuple):
    """When the buffer of one leaf spills, over some steps in a row."""

    entries: Any  # `SpillEntry` or `DeferredEntry`, of arrays [steps]
    end: Mark


@dataclasses.dataclass(frozen=True)
class Buffer(abc.ABC):
    """Where the digits go that a multiplication by n/d would lose. Stateless: the digits come in and go out."""

    @abc.abstractmethod
    def empty(self, like: Array, capacity: int | None) -> Any:
        """Digits of a value of this shape: `capacity` words per parameter; None drops them (a run not to be reversed)."""

    @abc.abstractmethod
    def capacity(self, digits: Any) -> int | None:
        """What `empty` was given."""

    @abc.abstractmethod
    def multiply_by(self, digits: Any, value: Fixed, n: Any, denominator: int, entry: Any) -> tuple[Any, Fixed]:
        """value <- value n/d, the digit lost kept: int64 [] or [...], max(1, d / 2^16) <= n <= d."""

    @abc.abstractmethod
    def divide_by(self, digits: Any, value: Fixed, n: Any, denominator: int, entry: Any) -> tuple[Any, Fixed]:
        """The inverse of `multiply_by`."""

    @abc.abstractmethod
    def replaced(self, denominator: int) -> int:
        """How many of its last bits a value has others of after a decay."""

    @abc.abstractmethod
    def without_words(self, digits: Any) -> Any:
        """Without the stack: for steps that nobody reverses from their end."""

    @abc.abstractmethod
    def with_words(self, digits: Any, like: Array, capacity: int) -> Any:
        """With an empty stack of `capacity` words per parameter: for steps that are reversed to here. like: the value."""

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
    def start(self) -> Mark:
        """Before the first step."""

    @abc.abstractmethod
    def schedule(self, n: Array, denominator: int, before: Mark | None = None) -> Schedule:
        """int64 [steps], a leaf's smallest numerator at each step (a bound for the others). before: None, `start`."""

    @abc.abstractmethod
    def residual_bits(self, mark: Mark) -> Array:
        """float []: bits that wait to become words."""

    @abc.abstractmethod
    def words_needed(self, n: np.ndarray, denominator: int) -> int:
        """`schedule(n, denominator).end.words` for concrete numerators, in Python's numbers."""

    @abc.abstractmethod
    def most_words(self, steps: int, bits: float) -> int:
        """A bound on the words of any `steps` steps in a row that lose at most `bits` each."""
