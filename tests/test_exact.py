"""Laws of reversible multiplication, with integers at the edges of what the buffers hold.

The oracle is `Reference`: one weight's head and stack in Python integers, written from the docstring of `exact.buffer`.
"""

import functools
from typing import Any, NamedTuple

import gmpy2
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hypergrad import exact
from hypergrad.exact import DEVICE, GMPY2, Turn, divide, words_needed
from hypergrad.exact.buffer import Buffer


DENOMINATORS = (2**12, 2**16, 2**24)
STEPS, WEIGHTS = 130, 3
LARGEST = 2**62
# The smallest n loses most digits, so this capacity is enough for any n_1..n_STEPS, and exactly full for that one.
SMALLEST = {d: max(1, d // 2**16) for d in DENOMINATORS}
CAPACITY = {d: words_needed(np.full(STEPS, SMALLEST[d]), d) for d in DENOMINATORS}

schedule = jax.jit(exact.schedule, static_argnums=1)


class Trace(NamedTuple):
    """One weight or many: what each step took in and left behind, leading axis = step; the stack is the last one."""

    c_in: Any
    c_out: Any
    heads: Any
    stack: Any


class Reference:
    """Algorithm 7 on one weight: a head and a stack of 16-bit words whose top mirrors the low bits of the head."""

    def __init__(self, capacity: int) -> None:
        self.head, self.stack, self.top, self.bound = 0, [0] * (capacity + 1), 0, 0

    def multiply_by(self, c: int, n: int, smallest_n: int, d: int) -> int:
        if (self.bound * d + d - 1) // smallest_n >= 2**32:
            self.head, self.bound, self.top = self.head // 2**16, self.bound // 2**16, self.top + 1
        self.bound = (self.bound * d + d - 1) // smallest_n
        i = self.head * d + c % d
        c = c // d
        c = c * n + i % n
        self.head = i // n
        self.stack[self.top] = self.head % 2**16
        return c


def reference_trace(c_in: np.ndarray, n: np.ndarray, d: int) -> Trace:
    """int [steps, weights] twice -> the trace of all weights, in Python integers."""
    buffers = [Reference(CAPACITY[d]) for _ in range(WEIGHTS)]
    c_out, heads = [], []
    for c_row, n_row in zip(c_in.tolist(), n.tolist(), strict=True):
        c_out.append([b.multiply_by(c, k, min(n_row), d) for b, c, k in zip(buffers, c_row, n_row, strict=True)])
        heads.append([b.head for b in buffers])
    return Trace(c_in, np.array(c_out), np.array(heads), np.array([b.stack for b in buffers]).T)


@functools.partial(jax.jit, static_argnums=2)
def device_forward(c_in, n, d):
    """Every step multiplies a c of its own and all share the buffer, so that every step can meet the extremes."""

    def body(buffer, x):
        buffer, c = DEVICE.multiply_by(buffer, x[0], x[1], d, x[2])
        return buffer, (c, buffer.head)

    plan = schedule(n.min(axis=1), d)
    buffer, (c_out, heads) = jax.lax.scan(body, DEVICE.empty((WEIGHTS,), CAPACITY[d]), (c_in, n, plan.turns))
    return Trace(c_in, c_out, heads, buffer.stack)


@functools.partial(jax.jit, static_argnums=2)
def device_backward(trace, n, d):
    """The same, mirrored: from the last buffer and every step's c_out back to (c_in, the heads before each step)."""

    def body(buffer, x):
        buffer, c = DEVICE.divide_by(buffer, x[0], x[1], d, x[2])
        return buffer, (c, buffer.head)

    plan, end = schedule(n.min(axis=1), d), Buffer(trace.heads[-1], trace.stack)
    return jax.lax.scan(body, end, (trace.c_out, n, plan.turns), reverse=True)[1]


def assert_round_trip(trace: Trace, c_in: Any, heads_before: Any) -> None:
    """What every inverse goes through: the integers and all heads are back, bit for bit, and the first head is empty."""
    expected = np.concatenate([np.zeros((1, WEIGHTS), np.int64), np.asarray(trace.heads)[:-1]])
    np.testing.assert_array_equal(c_in, trace.c_in)
    np.testing.assert_array_equal(heads_before, expected)


def extremes(d: int) -> st.SearchStrategy[int]:
    edges = [0, -1, 1, d - 1, d, -d, LARGEST, LARGEST - 1, -LARGEST, 1 - LARGEST]
    return st.sampled_from(edges) | st.integers(-LARGEST, LARGEST)


def numerators(d: int) -> st.SearchStrategy[int]:
    return st.sampled_from([max(1, d // 2**16), d - 1, d, d // 2]) | st.integers(max(1, d // 2**16), d)


@st.composite
def tables(draw, elements: st.SearchStrategy[int]) -> np.ndarray:
    """int64 [STEPS, WEIGHTS]: another value for every step and weight, for every step only, or always the same."""
    shape = draw(st.sampled_from([1, 2, 5, 7])), draw(st.sampled_from([1, WEIGHTS]))
    pattern = draw(hnp.arrays(np.int64, shape, elements=elements, fill=st.nothing()))
    return np.resize(np.broadcast_to(pattern, (shape[0], WEIGHTS)), (STEPS, WEIGHTS))


def runs(d: int) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    """(c, n) of a run. Their patterns repeat with periods of their own, so that c and n meet in every combination."""
    return st.tuples(tables(extremes(d)), tables(numerators(d)))


@pytest.mark.parametrize("d", DENOMINATORS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=100)
def test_device_buffer_is_head_and_stack_and_comes_back(d, data):
    c, n = data.draw(runs(d))
    expected = reference_trace(c, n, d)
    with jax.enable_x64(True):
        trace = device_forward(c, n, d)
        for name in Trace._fields:
            np.testing.assert_array_equal(getattr(trace, name), getattr(expected, name), err_msg=name)
        assert_round_trip(trace, *device_backward(trace, n, d))


@pytest.mark.parametrize("d", DENOMINATORS)
@pytest.mark.parametrize("c", [0, -1, LARGEST, -LARGEST])
def test_every_word_used_and_every_word_returned(d, c):
    c, n = np.full((STEPS, WEIGHTS), c), np.full((STEPS, WEIGHTS), SMALLEST[d])
    with jax.enable_x64(True):
        assert int(schedule(n[:, 0], d).words) == CAPACITY[d]  # the last word that fits is the last that is written
        trace = device_forward(c, n, d)
        assert_round_trip(trace, *device_backward(trace, n, d))


def test_the_checker_catches_an_inverse_off_by_one_quantum():
    rng = np.random.default_rng(0)
    c, n = rng.integers(-LARGEST, LARGEST, (STEPS, WEIGHTS)), rng.integers(1, 2**16, (STEPS, WEIGHTS))
    with jax.enable_x64(True):
        trace = device_forward(c, n, 2**16)
        c_back, heads_back = (np.asarray(x) for x in device_backward(trace, n, 2**16))
    assert_round_trip(trace, c_back, heads_back)
    lie = np.zeros_like(c)
    lie[STEPS // 2, 1] = 1
    with pytest.raises(AssertionError):
        assert_round_trip(trace, c_back + lie, heads_back)
    with pytest.raises(AssertionError):
        assert_round_trip(trace, c_back, heads_back + lie)


@jax.jit
def there_and_back(buffer, c, n, turn):
    after, c_after = DEVICE.multiply_by(buffer, c, n, 2**16, turn)
    return after, DEVICE.divide_by(after, c_after, n, 2**16, turn)


@hypothesis.given(
    head=st.sampled_from([0, 1, 2**16 - 1, 2**16, 2**32 - 1]) | st.integers(0, 2**32 - 1),
    slot=st.sampled_from([0, 1, CAPACITY[2**16] - 1]),
    c=extremes(2**16),
    n=numerators(2**16),
)
def test_one_step_from_any_buffer(head, slot, c, n):
    # Any head that a step leaves below 2^32 may be multiplied without a spill; slots from the first to the last word.
    head = min(head, ((n << 32) - 2**16) // 2**16)
    with jax.enable_x64(True):
        buffer = Buffer(jnp.uint32(head), jnp.zeros(CAPACITY[2**16] + 1, jnp.uint16))
        turn = Turn(jnp.int64(n), jnp.bool_(False), jnp.int32(slot))
        after, (back, c_back) = there_and_back(buffer, jnp.int64(c), jnp.int64(n), turn)
    assert (int(back.head), int(c_back)) == (head, c)
    assert int(after.head) == (head * 2**16 + c % 2**16) // n < 2**32
    assert int(after.stack[slot]) == int(after.head) % 2**16


@hypothesis.given(
    head=st.sampled_from([0, 2**16, 2**32 - 1]) | st.integers(0, 2**32 - 1),
    slot=st.sampled_from([0, CAPACITY[2**16] - 1]),
    c=extremes(2**16),
    n=numerators(2**16),
)
def test_one_step_that_spills_from_any_buffer(head, slot, c, n):
    # Before a spill a head may be anything, and its low word is in the stack already.
    with jax.enable_x64(True):
        stack = jnp.zeros(CAPACITY[2**16] + 1, jnp.uint16).at[slot].set(head % 2**16)
        turn = Turn(jnp.int64(n), jnp.bool_(True), jnp.int32(slot))
        after, (back, c_back) = there_and_back(Buffer(jnp.uint32(head), stack), jnp.int64(c), jnp.int64(n), turn)
    assert (int(back.head), int(c_back)) == (head, c)
    assert int(after.stack[slot]) == head % 2**16
    assert int(after.head) == ((head >> 16) * 2**16 + c % 2**16) // n < 2**32


jitted_divide = jax.jit(divide)
QUOTIENTS = st.sampled_from([0, 1, -1, 2**50 - 1, -(2**50)]) | st.integers(-(2**50), 2**50 - 1)


@hypothesis.given(
    quotient=hnp.arrays(np.int64, 64, elements=QUOTIENTS),
    n=hnp.arrays(np.int64, 64, elements=st.integers(1, 2**12) | numerators(2**16)),
    rest=hnp.arrays(np.int64, 64, elements=st.integers(0, 2**16)),
)
def test_divide_is_floor_division(quotient, n, rest):
    # Also at both ends of every remainder, where a rounded quotient would go wrong first. |quotient n| < 2^50 2^12 here.
    quotient = np.where(n > 2**12, quotient >> 4, quotient)
    with jax.enable_x64(True):
        for r in (np.zeros_like(n), n - 1, rest % n):
            q, digit = jitted_divide(quotient * n + r, n)
            np.testing.assert_array_equal(q, quotient)
            np.testing.assert_array_equal(digit, r)


@pytest.mark.parametrize("d", DENOMINATORS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=20)
def test_head_is_one_gmpy2_integer_until_the_first_spill(d, data):
    c, n = data.draw(runs(d))
    with jax.enable_x64(True):
        trace = device_forward(c, n, d)
        spills = np.asarray(schedule(n.min(axis=1), d).turns.spills)
        before_spill = int(np.argmax(spills)) if spills.any() else STEPS
        buffer = GMPY2.empty((WEIGHTS,), None)
        for t in range(before_spill):
            buffer, c_out = GMPY2.multiply_by(buffer, c[t], n[t], d)
            assert buffer.i.tolist() == np.asarray(trace.heads)[t].tolist()
            np.testing.assert_array_equal(c_out, trace.c_out[t])


@st.composite
def rational_steps(draw) -> list[tuple[int, int, int]]:
    """(c, n, d) with any 1 <= n <= d: d need not be a power of two."""
    ds = draw(st.lists(st.integers(2, 2**40) | st.sampled_from([3, 10, 10**9 + 7]), min_size=1, max_size=8))
    return [(draw(extremes(d)), draw(numerators(d)), d) for d in ds]


@hypothesis.given(rational_steps())
def test_gmpy2_buffer_comes_back_for_any_ratio(steps):
    with jax.enable_x64(True):
        buffers, outs = [GMPY2.empty((), None)], []
        for c, n, d in steps:
            # |c n/d + n| <= 2^62 + 2^40 fits an int64.
            buffer, out = GMPY2.multiply_by(buffers[-1], np.int64(c), n, d)
            buffers.append(buffer)
            outs.append(out)
        buffer = buffers[-1]
        for (c, n, d), out, before in zip(steps[::-1], outs[::-1], buffers[-2::-1], strict=True):
            buffer, back = GMPY2.divide_by(buffer, out, n, d)
            assert int(back) == c and buffer.i.item() == before.i.item()
    assert GMPY2.is_empty(buffer).all()


def test_gmpy2_buffer_holds_gmpy2_integers():
    with jax.enable_x64(True):
        buffer, _ = GMPY2.multiply_by(GMPY2.empty((2,), None), np.array([-1, 5]), 1, 2**16)
    assert [type(i) for i in buffer.i] == [type(gmpy2.mpz(0))] * 2
    assert buffer.i.tolist() == [2**16 - 1, 5]  # n = 1: c mod d is all that goes in
    assert not GMPY2.is_empty(buffer).all()
