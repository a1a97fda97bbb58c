"""The law of reversible multiplication, with integers at the edges of what values and buffers hold.

The oracle of the heads is `OneWeight`: a head and a stack in Python integers, written from the docstring of `HeadsAndWords`;
that of deferred decays is the product in rational numbers.
"""

import dataclasses
import itertools
from fractions import Fraction
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import every_value, long, some_of
from extremes import (
    BUFFERS,
    DENOMINATORS,
    LARGEST,
    LOW,
    SMALLEST,
    STEPS,
    VALUES,
    WEIGHTS,
    Run,
    assert_came_back,
    cases,
    cases_of,
    entry_of,
    extremes,
    fixed,
    integers,
    numerators,
    round_trip,
    runs,
    schedule,
    tables,
    worst,
)
from hypothesis import strategies as st

from hypergrad.exact import DEFERRED, HEADS, Buffer, Deferred, Fixed, Heads, HeadsAndWords, Reference, SpillEntry, Words
from hypergrad.exact.deferred import FULL_SCALE


pytestmark = pytest.mark.of_bits


IN_SHORT = (
    "heads, one limb, 2^16-decays and increments",
    "heads, one limb, 2^24-decays",
    "heads, wide, 2^12-decays and increments",
    "deferred, one limb, 2^12-decays and increments",
    "deferred, wide, 2^16-decays and increments",
    "deferred, wide, 2^24-decays",
    "reference, one limb, 2^16-decays",
    "deferred reference, wide, 2^16-decays and increments",
)


def with_and_without_increments():
    found = []
    for case, adds in itertools.product(cases(), (False, True)):
        name = f"{case.id}-{'decays and increments' if adds else 'decays'}"
        found.append((pytest.param if name in IN_SHORT else long)(*case.values, adds, id=name))
    return found


@pytest.mark.parametrize(("buffer", "wide", "d", "adds"), with_and_without_increments())
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40)
def test_every_step_is_undone(buffer, wide, d, adds, data):
    steps = 5 if isinstance(buffer, Reference) else STEPS  # operation by operation, without a limit to come near to
    run = data.draw(runs(buffer, d, wide, adds, steps))
    assert_came_back(buffer, round_trip(buffer, d, worst(buffer, d, steps), run))


@dataclasses.dataclass(frozen=True)
class Lying:
    """A buffer whose inverse is off by one quantum, or by one lost digit, where the fourth word returns."""

    truth: Buffer
    of_digits: bool

    def __getattr__(self, name):
        return getattr(self.truth, name)

    def divide_by(self, digits, value, n, denominator, entry):
        digits, value = self.truth.divide_by(digits, value, n, denominator, entry)
        lie = entry.slot == 3
        if self.of_digits:
            return digits._replace(head=digits.head + lie), value
        return digits, value._replace(high=value.high + lie)


@every_value("buffer, wide", [Lying(HEADS, False), Lying(HEADS, True), Lying(DEFERRED, False)], VALUES.values())
def test_the_law_catches_an_inverse_off_by_one_quantum(buffer, wide):
    rng, shape = np.random.default_rng(0), (STEPS, WEIGHTS)
    low = rng.integers(0, 2**46, shape) if wide else None
    drawn = Fixed(rng.integers(-LARGEST, LARGEST, shape), low)
    run = Run(drawn, np.full(STEPS, True), rng.integers(1, 2**16, shape), None)
    assert_came_back(buffer.truth, round_trip(buffer.truth, 2**16, STEPS, run))
    with pytest.raises(AssertionError):
        assert_came_back(buffer, round_trip(buffer, 2**16, STEPS, run))


def full(buffer: Buffer, d: int, first: list[int], wide: bool) -> Run:
    """Of the smallest decay, which takes a word as often as any can."""
    high, low = (np.resize(x, (STEPS, WEIGHTS)) for x in (first, LOW))
    return Run(Fixed(high, low if wide else None), np.full(STEPS, True), np.full((STEPS, WEIGHTS), SMALLEST[d]), None)


@some_of("first", [0, -1, LARGEST, -LARGEST], -1, LARGEST)
@pytest.mark.parametrize(("buffer", "wide", "d"), [case for case in cases() if not isinstance(case.values[0], Reference)])
def test_every_word_used_and_every_word_returned(buffer, wide, d, first):
    run = full(buffer, d, [first], wide)
    assert int(buffer.schedule(jnp.asarray(run.n[:, 0]), d).end.words) == worst(
        buffer, d, STEPS
    )  # the last that fits is written
    assert_came_back(buffer, round_trip(buffer, d, worst(buffer, d, STEPS), run))


@pytest.mark.parametrize("buffer", [HEADS, DEFERRED], ids=["heads", "deferred"])
def test_one_word_short_is_noticed(buffer):
    run = full(buffer, 2**16, [0], wide=False)
    run = run._replace(drawn=Fixed(np.random.default_rng(0).integers(-LARGEST, LARGEST, (STEPS, WEIGHTS))))
    needed = worst(buffer, 2**16, STEPS)
    assert_came_back(buffer, round_trip(buffer, 2**16, needed, run))
    with pytest.raises(AssertionError):
        assert_came_back(buffer, round_trip(buffer, 2**16, needed - 1, run))


def test_decays_that_lose_less_than_a_word_need_no_room():
    run = full(DEFERRED, 2**16, [12345, -(2**40) - 7, 2**44 + 3], wide=False)
    n, increments = np.full((STEPS, WEIGHTS), 65000), np.random.default_rng(0).normal(size=(STEPS, WEIGHTS))
    run = run._replace(n=n, increments=increments, fresh=np.arange(STEPS) == 0)
    assert DEFERRED.words_needed(n[:, 0], 2**16) == 0
    with_room, without = (round_trip(DEFERRED, 2**16, k, run) for k in (1, 0))
    assert_came_back(DEFERRED, without)
    jax.tree.map(
        np.testing.assert_array_equal, with_room._replace(digits=None, first=None), without._replace(digits=None, first=None)
    )


class OneWeight:
    """Algorithm 7 on one weight: a head and a stack of 16-bit words whose top mirrors the low bits of the head."""

    def __init__(self, capacity: int, wide: bool) -> None:
        self.wide = wide
        self.head, self.stack, self.top, self.bound = 0, [0] * (capacity + 1), 0, 0

    def multiply_by(self, c: int, n: int, smallest_n: int, d: int) -> int:
        if (self.bound * d + d - 1) // smallest_n >= 2**32:
            self.head, self.bound, self.top = self.head // 2**16, self.bound // 2**16, self.top + 1
        self.bound = (self.bound * d + d - 1) // smallest_n
        i = self.head * d + c % d
        c = (c if self.wide else c + d // 2) // d
        c = c * n + (i % n if self.wide or i % n < n - n // 2 else i % n - n)
        self.head = i // n
        self.stack[self.top] = self.head % 2**16
        return c


def by_hand(run: Run, d: int, capacity: int) -> tuple[list[int], list[int], list[list[int]]]:
    """(values after each step and weight, heads, stacks)."""
    weights, values, heads = [OneWeight(capacity, run.drawn.low is not None) for _ in range(WEIGHTS)], [], []
    drawn = iter(np.split(np.array(integers(run.drawn), object), STEPS))
    for t, n in enumerate(run.n.tolist()):
        row = next(drawn).tolist()
        found = row if run.fresh[t] or t == 0 else values[-WEIGHTS:]
        values += [w.multiply_by(c, k, min(n), d) for w, c, k in zip(weights, found, n, strict=True)]
        heads += [w.head for w in weights]
    return values, heads, np.array([w.stack for w in weights]).T.tolist()


@pytest.mark.parametrize(("buffer", "wide", "d"), cases_of(HEADS, "heads, one limb, 2^16", "heads, wide, 2^12"))
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_heads_are_a_head_and_a_stack(buffer, wide, d, data):
    run, capacity = data.draw(runs(HEADS, d, wide, False, STEPS)), worst(HEADS, d, STEPS)
    values, heads, stacks = by_hand(run, d, capacity)
    trace = round_trip(HEADS, d, capacity, run)
    assert integers(trace.after[0]) == values
    assert np.ravel(trace.after[1]).tolist() == heads
    assert np.asarray(trace.digits.stack).tolist() == stacks


@jax.jit
def there_and_back(digits: Heads, value: Fixed, n: Any, entry: SpillEntry) -> Any:
    after, new = HEADS.multiply_by(digits, value, n, 2**16, entry)
    return after, HEADS.divide_by(after, new, n, 2**16, entry)


ONE = worst(HEADS, 2**16, STEPS)


@hypothesis.given(
    head=st.sampled_from([0, 1, 2**16 - 1, 2**16, 2**32 - 1]) | st.integers(0, 2**32 - 1),
    slot=st.sampled_from([0, 1, ONE - 1]),
    c=extremes(2**16, LARGEST),
    n=numerators(2**16),
)
def test_one_step_from_any_head(head, slot, c, n):
    # Any head that a step leaves below 2^32 may be multiplied without a spill; slots from the first to the last word.
    head = min(head, ((n << 32) - 2**16) // 2**16)
    digits = Heads(jnp.uint32(head), jnp.zeros(ONE + 1, jnp.uint16))
    entry = SpillEntry(jnp.int64(n), jnp.bool_(False), jnp.int32(slot))
    after, (back, value) = there_and_back(digits, Fixed(jnp.int64(c)), jnp.int64(n), entry)
    assert (int(back.head), int(value.high)) == (head, c)
    assert int(after.head) == (head * 2**16 + c % 2**16) // n < 2**32
    assert int(after.stack[slot]) == int(after.head) % 2**16


@hypothesis.given(
    head=st.sampled_from([0, 2**16, 2**32 - 1]) | st.integers(0, 2**32 - 1),
    slot=st.sampled_from([0, ONE - 1]),
    c=extremes(2**16, LARGEST),
    n=numerators(2**16),
)
def test_one_step_that_spills_from_any_head(head, slot, c, n):
    # Before a spill a head may be anything, and its low word is in the stack already.
    stack = jnp.zeros(ONE + 1, jnp.uint16).at[slot].set(head % 2**16)
    entry = SpillEntry(jnp.int64(n), jnp.bool_(True), jnp.int32(slot))
    after, (back, value) = there_and_back(Heads(jnp.uint32(head), stack), Fixed(jnp.int64(c)), jnp.int64(n), entry)
    assert (int(back.head), int(value.high)) == (head, c)
    assert int(after.stack[slot]) == head % 2**16
    assert int(after.head) == ((head >> 16) * 2**16 + c % 2**16) // n < 2**32


EDGES = [0, -1, 1, 2**16 - 1, 2**16, -(2**16) - 1, 2**45, 2**46 - 2**30, 2**30 - 2**46]


@every_value("d, wide", DENOMINATORS, VALUES.values())
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_deferred_values_are_the_exact_product_to_a_quantum(d, wide, data):
    """In rational numbers. Each word that leaves takes half a quantum of the full scale, of two limbs one; scales are
    floats."""
    n = data.draw(tables(numerators(d), STEPS))[:, 0]
    start = fixed(EDGES, wide)
    end = multiplied(DEFERRED.hold(start), d, n)
    scale, exact = Fraction(float(end.scale[0])), Fraction(int(FULL_SCALE))
    for k in n.tolist():
        exact *= Fraction(k, d)
    for z, first in zip(integers(end), integers(start), strict=True):
        error = abs(z * scale - first * exact)
        rounded = Fraction(2 if wide else 0.51) * int(FULL_SCALE)
        assert error <= rounded + abs(first * exact) * STEPS * Fraction(1, 2**52)


@jax.jit
def _multiplied(value: Fixed, entries: Any) -> Fixed:
    body = lambda x, entry: (DEFERRED.multiply_by(Words(None), x, None, 2**16, entry)[1], None)  # noqa: E731
    return jax.lax.scan(body, value, entries)[0]


def multiplied(value: Fixed, d: int, n: np.ndarray) -> Fixed:
    return _multiplied(value, DEFERRED.schedule(jnp.asarray(n), d).entries)


def test_what_falls_to_nothing_ends_at_zero():
    """From both sides: rounded down it would stop at -1."""
    n = np.full(6, 1)
    end = multiplied(DEFERRED.hold(fixed([-1, 1, -(2**15), 2**15 - 1, -(2**46), 2**46, -3 * 2**15, 0], False)), 2**16, n)
    assert integers(end) == [0] * 8


@pytest.mark.parametrize("buffer", [HEADS, DEFERRED], ids=["heads", "deferred"])
def test_digits_that_nobody_takes_back_are_dropped(buffer):
    kept, dropped = (buffer.empty(jnp.zeros(3), capacity) for capacity in (4, None))
    entries = buffer.schedule(jnp.full(6, 7), 2**16).entries
    value = other = buffer.hold(fixed([5, -(2**40), 2**61], False))
    for t in range(6):
        entry = jax.tree.map(lambda x, t=t: x[t], entries)
        kept, value = buffer.multiply_by(kept, value, jnp.int64(7), 2**16, entry)
        dropped, other = buffer.multiply_by(dropped, other, jnp.int64(7), 2**16, entry)
    assert dropped.stack is None and value.equals(other).all() and (np.asarray(kept.stack) > 0).any()


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_is_empty_until_a_digit_is_lost(name):
    buffer, value = BUFFERS[name], BUFFERS[name].hold(fixed([5, 0, -1], False))
    digits, entries = buffer.empty(value.high, 3), schedule(buffer, np.ones(3, int), 2**16).entries
    assert np.all(buffer.is_empty(digits))
    for t in range(2):
        digits, value = buffer.multiply_by(digits, value, jnp.int64(1), 2**16, entry_of(entries, t))
    if buffer == DEFERRED:  # it is known beforehand how many words return
        assert buffer.is_empty(digits)
    else:
        assert np.asarray(buffer.is_empty(digits)).tolist() == [False, True, False]


def test_buffers_are_equal_by_what_they_do():
    assert HeadsAndWords() == HEADS and Deferred() == DEFERRED and Reference(True) == BUFFERS["deferred reference"]
    assert len({HeadsAndWords(), *BUFFERS.values(), Deferred(), Reference()}) == 4
