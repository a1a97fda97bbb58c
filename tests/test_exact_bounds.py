"""When words are spilled, how many, and how large a head can get: the bounds of the exact layer, each at its worst."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hypergrad.exact import (
    DEVICE,
    FINE_DENOMINATOR,
    MOMENTUM_DENOMINATOR,
    WORD_BITS,
    known_numerator,
    numerator,
    schedule,
    to_ratio,
    words_needed,
)


DENOMINATORS = (2**12, MOMENTUM_DENOMINATOR, FINE_DENOMINATOR)
SMALLEST = {d: max(1, d // 2**16) for d in DENOMINATORS}
STEPS = 130
LONG = 20_000

jitted_schedule = jax.jit(schedule, static_argnums=1)


def reference_bounds(n: list[int], d: int) -> tuple[list[bool], list[int], list[int]]:
    """(spills, words spilled before each step, bound after each step), as the docstring of `exact.buffer` says."""
    spills, slots, bounds, bound, words = [], [], [], 0, 0
    for k in n:
        spills.append((bound * d + d - 1) // k >= 2**32)
        slots.append(words)
        if spills[-1]:
            bound, words = bound // 2**16, words + 1
        bound = (bound * d + d - 1) // k
        bounds.append(bound)
    return spills, slots, bounds


def numerators(d: int) -> st.SearchStrategy[np.ndarray]:
    edges = st.sampled_from([SMALLEST[d], d // 2, d - 1, d]) | st.integers(SMALLEST[d], d)
    pattern = st.sampled_from([1, 2, 5, 7]).flatmap(lambda k: hnp.arrays(np.int64, k, elements=edges, fill=st.nothing()))
    return pattern.map(lambda n: np.resize(n, STEPS))


@pytest.mark.parametrize("d", DENOMINATORS)
@hypothesis.given(data=st.data())
def test_schedule_is_words_needed_and_no_head_reaches_2_to_the_32(d, data):
    n = data.draw(numerators(d))
    spills, slots, bounds = reference_bounds(n.tolist(), d)
    with jax.enable_x64(True):
        plan = jitted_schedule(n, d)
    np.testing.assert_array_equal(plan.turns.n, n)
    np.testing.assert_array_equal(plan.turns.spills, spills)
    np.testing.assert_array_equal(plan.turns.slot, slots)
    assert int(plan.words) == words_needed(n, d) == sum(spills)
    np.testing.assert_allclose(plan.held, np.log2(bounds[-1] + 1.0), rtol=1e-6)
    assert max(bounds) < 2**32


def spilled_at(d: int) -> list[int]:
    return np.flatnonzero(reference_bounds([SMALLEST[d]] * STEPS, d)[0]).tolist()


def test_worst_case_for_d_2_to_the_12_is_3_words_every_4_steps():
    # n = 1: 12 bits a step. Bits held after each step: 12, 24 | spill: 8 -> 20 | 32, full | spill: 16 -> 28 |
    # spill: 12 -> 24 | ...: 4 steps lose 48 bits, three words.
    assert spilled_at(2**12) == [t for t in range(2, STEPS) if t % 4 != 3]
    assert max(reference_bounds([1] * STEPS, 2**12)[2]) == 2**32 - 1


@pytest.mark.parametrize("d", [2**16, 2**24])
def test_worst_case_of_the_others_is_a_word_every_step(d):
    # n/d = 2^-16: 16 bits a step, the head is full after two, and what a spill leaves it, 16 bits, becomes 32 again.
    assert spilled_at(d) == list(range(2, STEPS))
    assert max(reference_bounds([SMALLEST[d]] * STEPS, d)[2]) == 2**32 - 1


@pytest.mark.parametrize("d", DENOMINATORS)
def test_heads_reach_their_bound(d):
    # c = -1 and the smallest n: every digit lost is d - 1, the largest, so no smaller bound would do.
    n, bounds = np.full(STEPS, SMALLEST[d]), reference_bounds([SMALLEST[d]] * STEPS, d)[2]

    def body(carry, turn):
        buffer, c = DEVICE.multiply_by(*carry, turn.n, d, turn)
        return (buffer, c), (buffer.head, c)

    with jax.enable_x64(True):
        plan = schedule(n, d)
        start = DEVICE.empty((), int(plan.words)), jnp.int64(-1)
        _, (heads, cs) = jax.jit(lambda: jax.lax.scan(body, start, plan.turns))()
    assert np.asarray(heads).tolist() == bounds
    assert set(np.asarray(cs).tolist()) == {-1}


@pytest.mark.parametrize("decays", [(0.5,), (0.9,), (0.98,), (0.995,), (0.5, 0.9, 0.98, 0.995)])
def test_bits_stored_are_those_lost(decays):
    d = 2**16
    n = np.resize(np.round(np.array(decays) * d).astype(np.int64), LONG)
    ideal = np.log2(d / n).sum()
    with jax.enable_x64(True):
        plan = jitted_schedule(n, d)
        stored = WORD_BITS * int(plan.words) + float(plan.held)
    assert int(plan.words) == words_needed(n, d)
    assert abs(stored - ideal) <= 0.01 * ideal + 64  # 64 bits: the head


def test_nothing_is_stored_where_nothing_decays():
    # n = d: c is taken apart and put together again, and i = (i d + c mod d) div d is the old i.
    n = np.full(LONG, 2**16)
    with jax.enable_x64(True):
        plan = jitted_schedule(n, 2**16)
    # The bound is (bound d + d - 1) div d = bound: it stays 0.
    assert (int(plan.words), float(plan.held)) == (0, 0.0) and words_needed(n, 2**16) == 0


@pytest.mark.parametrize("d", DENOMINATORS)
@hypothesis.given(data=st.data())
def test_ratio_and_numerator_are_inverse(d, data):
    n = data.draw(hnp.arrays(np.int64, 8, elements=st.sampled_from([SMALLEST[d], d - 1, d]) | st.integers(SMALLEST[d], d)))
    with jax.enable_x64(True):
        for dtype in (jnp.float32, jnp.float64):  # 24 bits are exact in both
            ratio = to_ratio(jnp.asarray(n / d, dtype), d)
            assert ratio.dtype == dtype
            np.testing.assert_array_equal(np.asarray(ratio, np.float64), n / d)
            np.testing.assert_array_equal(numerator(ratio, d), n)


def test_denominators_are_the_documented_ones():
    assert (MOMENTUM_DENOMINATOR, FINE_DENOMINATOR) == (2**16, 2**24)


def test_ratio_is_rounded_and_its_derivative_is_one():
    value, slope = jax.value_and_grad(lambda rho: to_ratio(rho, 2**16))(0.9)
    assert float(value) * 2**16 == 58982 and 0.9 * 2**16 == pytest.approx(58982.4)
    assert float(slope) == 1.0


def test_numerators_out_of_range_are_clipped_so_that_division_stays_defined():
    with jax.enable_x64(True):
        n = np.asarray(numerator(jnp.array([-1.0, 0.0, 1e-9, 1.0, 2.0, jnp.nan]), 2**16)).tolist()
    assert n[:-1] == [1, 1, 1, 2**16, 2**16]
    assert 1 <= n[-1] <= 2**16  # NaN: anything but a division by zero


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@hypothesis.given(rho=hnp.arrays(np.float64, 20, elements=st.floats(-0.5, 1.5) | st.sampled_from([np.nan, 0.0, 1.0])))
@hypothesis.settings(deadline=None, max_examples=40)
def test_a_numerator_known_beforehand_is_that_of_the_program(dtype: type, rho: np.ndarray) -> None:
    with jax.enable_x64(True):
        for d in DENOMINATORS:
            program = numerator(to_ratio(jnp.asarray(rho, dtype), d, may_be_one=True), d)
            np.testing.assert_array_equal(known_numerator(rho.astype(dtype), d), program)
