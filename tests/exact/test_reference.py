"""The buffers on the device beside Algorithm 7 as printed, with one integer of any length per parameter."""

import gmpy2
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from extremes import (
    BUFFERS,
    LARGEST,
    STEPS,
    VALUES,
    cases_of,
    entry_of,
    extremes,
    fixed,
    integers,
    numerators,
    round_trip,
    runs,
    schedule,
    worst,
)
from hypothesis import strategies as st

from hypergrad.exact import DEFERRED, DEFERRED_REFERENCE, HEADS, REFERENCE, Fixed


pytestmark = pytest.mark.of_bits


@pytest.mark.parametrize(("buffer", "wide", "d"), cases_of(HEADS, "heads, one limb, 2^24", "heads, wide, 2^16"))
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=20)
def test_a_head_is_one_integer_until_the_first_spill(buffer, wide, d, data):
    run = data.draw(runs(HEADS, d, wide, False, STEPS))
    device = round_trip(HEADS, d, worst(HEADS, d, STEPS), run)
    spills = np.asarray(schedule(HEADS, run.n.min(axis=1), d).entries.spills)
    digits = REFERENCE.empty(run.n[0], None)
    for t in range(int(np.argmax(spills)) if spills.any() else STEPS):
        digits, value = REFERENCE.multiply_by(digits, entry_of(device.before[0], t), run.n[t], d, None)
        assert digits.i.tolist() == np.asarray(device.after[1])[t].tolist()
        jax.tree.map(np.testing.assert_array_equal, value, entry_of(device.after[0], t))
        assert all(limb.dtype == jnp.int64 for limb in jax.tree.leaves((value, device.after[0])))


def test_the_stack_of_deferred_decays_is_one_integer():
    """By 1/2^16: the same values at every step, and the words are the digits of the integer."""
    n = np.random.default_rng(0).choice([1, 3, 700, 30_000, 58982], 25)
    start = x = DEFERRED.hold(fixed([0, -1, 1, 2**16 - 1, 2**16, -(2**16) - 1, 2**45, 2**46 - 2**30], wide=True))
    plan = schedule(DEFERRED, n, 2**16)
    steps = [entry_of(plan.entries, t) for t in range(len(n))]
    words, unbounded = DEFERRED.empty(x.high, int(plan.end.words)), (DEFERRED_REFERENCE.empty(x.high, None), x)
    for entry in steps:
        words, x = DEFERRED.multiply_by(words, x, None, 2**16, entry)
        unbounded = DEFERRED_REFERENCE.multiply_by(*unbounded, None, 2**16, entry)
        jax.tree.map(np.testing.assert_array_equal, unbounded[1], x)
    digits = [sum(int(w) << 16 * k for k, w in enumerate(column)) for column in np.asarray(words.stack)[::-1].T]
    assert digits == list(unbounded[0].i) and int(plan.end.words) > 5
    for entry in reversed(steps):
        unbounded = DEFERRED_REFERENCE.divide_by(*unbounded, None, 2**16, entry)
    assert DEFERRED_REFERENCE.is_empty(unbounded[0]).all()
    jax.tree.map(np.testing.assert_array_equal, unbounded[1], start)


@st.composite
def rational_steps(draw) -> list[tuple[int, int, int]]:
    """(c, n, d) with any 1 <= n <= d: d need not be a power of two."""
    ds = draw(st.lists(st.integers(2, 2**40) | st.sampled_from([3, 10, 10**9 + 7]), min_size=1, max_size=8))
    return [(draw(extremes(d, LARGEST)), draw(numerators(d)), d) for d in ds]


@pytest.mark.parametrize("wide", VALUES.values(), ids=VALUES)
@hypothesis.given(steps=rational_steps(), low=st.integers(0, 2**46 - 1))
def test_integers_without_bounds_come_back_for_any_ratio(wide, steps, low):
    all_digits, outs = [REFERENCE.empty(np.int64(0), None)], []
    for c, n, d in steps:
        # |c n/d + n| <= 2^62 + 2^40 fits an int64.
        value = Fixed(np.int64(c), np.int64(low) if wide else None)
        digits, out = REFERENCE.multiply_by(all_digits[-1], value, n, d, None)
        (before,), (after,) = integers(value), integers(out)
        i = all_digits[-1].i.item() * d + before % d
        half = (0, 0) if wide else (d // 2, n // 2)
        assert (after, digits.i.item()) == ((before + half[0]) // d * n + (i + half[1]) % n - half[1], i // n)
        all_digits.append(digits)
        outs.append(out)
    digits = all_digits[-1]
    for (c, n, d), out, before in zip(steps[::-1], outs[::-1], all_digits[-2::-1], strict=True):
        digits, back = REFERENCE.divide_by(digits, out, n, d, None)
        assert int(back.high) == c and digits.i.item() == before.i.item()
        assert not wide or int(back.low) == low
    assert REFERENCE.is_empty(digits).all()


def test_digits_are_gmpy2_integers_and_no_arrays():
    value = Fixed(np.array([-1, 5]))
    digits, _ = REFERENCE.multiply_by(REFERENCE.empty(value.high, None), value, 1, 2**16, None)
    assert [type(i) for i in digits.i] == [type(gmpy2.mpz(0))] * 2
    assert digits.i.tolist() == [2**16 - 1, 5]  # n = 1: c mod d is all that goes in
    assert not REFERENCE.is_empty(digits).all()
    assert jax.tree.leaves(digits) == [] and set(BUFFERS.values()) >= {REFERENCE, DEFERRED_REFERENCE}
