"""Values that left their range: a record says when and how large, stays, and the first one is found."""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import every_value, some_of
from extremes import GRIDS, SCALES, SIZE, STEP, VALUES, add_and_subtract, floats, quanta, scaled
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hypergrad.exact import DEFERRED, HEADS, STEPS, Fixed, Overflow, grid_range
from hypergrad.exact.fixed import overflow_record


pytestmark = pytest.mark.of_bits

BITS, LIMIT = 48, grid_range(48)
IN_RANGE = st.integers(1 - 2**62, 2**62 - 1)
MAGNITUDES = st.sampled_from([0.0, LIMIT, 1e30, float("inf"), float("nan")]) | st.floats(0, width=32, allow_subnormal=False)

first_overflow = lambda x: Overflow.of(*x.first_record())  # noqa: E731
each_overflow = jax.jit(lambda x: jax.vmap(lambda high: first_overflow(Fixed(high)))(x.high))


@hypothesis.given(
    values=hnp.arrays(np.int64, 9, elements=IN_RANGE),
    lost=st.dictionaries(st.integers(0, 8), st.tuples(st.integers(-1, STEPS - 1), MAGNITUDES)),
)
def test_the_first_record_is_found_among_values_and_later_ones(values, lost):
    for entry, (step, magnitude) in lost.items():
        values[entry] = overflow_record(step, jnp.float32(magnitude))
    found = first_overflow(Fixed(jnp.asarray(values)))
    if not lost:
        assert int(found.step) == STEPS
        return
    entry = min(lost, key=lambda i: (lost[i][0], i))
    assert (int(found.step), int(found.entry)) == (lost[entry][0], entry)
    np.testing.assert_array_equal(found.magnitude, np.float32(lost[entry][1]))


def test_nothing_has_no_overflow():
    assert int(first_overflow(Fixed(jnp.zeros((0,), jnp.int64))).step) == STEPS


@pytest.mark.parametrize(("dtype", "bits"), GRIDS)
@pytest.mark.parametrize("z", [0, 1, -1, 2**62 - 1, 1 - 2**62])
def test_increments_that_no_grid_value_holds_are_recorded_wherever_they_land(dtype, bits, z):
    limit = grid_range(bits)
    lost = np.array([math.nan, math.inf, -math.inf, limit, -limit, 1e30, -1e30], dtype)
    after, _ = add_and_subtract(Fixed(np.full(lost.shape, z)), lost, bits)
    found = each_overflow(after)
    assert (np.asarray(found.step) == STEP).all()
    np.testing.assert_array_equal(found.magnitude, np.abs(lost).astype(np.float32))


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("wide", VALUES.values(), ids=VALUES)
def test_what_no_value_can_hold_is_recorded_as_what_it_is(wide, scale):
    lost = np.array([np.nan, np.inf, 1e30, LIMIT])
    x = scaled(Fixed.zeros_like(jnp.zeros(5), wide), scale)
    after = x.add(jnp.append(lost, 0.99 * LIMIT), BITS, 3)
    found = each_overflow(after)
    assert found.step.tolist() == [3, 3, 3, 3, STEPS]
    np.testing.assert_array_equal(found.magnitude[:4], lost.astype(np.float32))
    assert (np.abs(after.decode(BITS, jnp.float64))[:4] >= LIMIT).all()


@some_of(("dtype", "bits"), GRIDS, (np.float32, 44), (np.float64, 60))
@hypothesis.given(data=st.data())
def test_sums_out_of_range_are_recorded_and_never_wrap(dtype, bits, data):
    # Both below 2^62 quanta in magnitude: the sum is below 2^63 and fits, and its size is known before it is replaced.
    ends = st.sampled_from([2**62 - 1, 1 - 2**62, 2**61, -(2**61)]) | IN_RANGE
    z = data.draw(hnp.arrays(np.int64, SIZE, elements=ends))
    increment = data.draw(hnp.arrays(dtype, SIZE, elements=floats(dtype, grid_range(bits))))
    after, _ = add_and_subtract(Fixed(z), increment, bits)
    found = jax.tree.map(np.asarray, each_overflow(after))
    sums = [a + quanta(b, bits) for a, b in zip(z.tolist(), increment.tolist(), strict=True)]
    for total, value, step, size in zip(sums, after.high.tolist(), found.step, found.magnitude, strict=True):
        assert step == (STEPS if abs(total) < 2**62 else STEP)
        assert value == total if step == STEPS else abs(size - abs(total) / 2**bits) <= 1e-6 * size


@pytest.mark.parametrize("scale", [1.0, 3.5, 2.0**16], ids=str)
def test_coarser_quanta_leave_their_range_as_early(scale):
    """Of values whose decay is deferred: |high scale| < 2^62."""
    end = int(2.0**62 * (1 / scale))
    z = jnp.asarray([end - 2, end - 1, end - 2, 2 - end, 1 - end, 2 - end])
    quantum = scale * 2.0**-BITS
    after = scaled(Fixed(z), scale).add(jnp.asarray([1.0, 1.0, 2.0, -1.0, -1.0, -2.0]) * quantum, BITS, 3)
    found = each_overflow(after)
    assert found.step.tolist() == [STEPS, 3, 3, STEPS, 3, 3]
    assert (after.high[0], after.high[3]) == (end - 1, 1 - end)
    np.testing.assert_allclose(found.magnitude[jnp.array([1, 2, 4, 5])], LIMIT, rtol=2e-4)


def test_a_record_stays_beside_a_sum_that_is_in_range():
    old = Fixed(jnp.stack([jnp.int64(7), overflow_record(3, jnp.float32(1e30))]), jnp.asarray([5, 5]))
    after = Fixed.zeros_like(jnp.zeros(2), wide=True).add(jnp.full(2, 0.7), 40, 4, old)
    assert (after.low[0] != 0, after.low[1], after.high[1]) == (True, 0, old.high[1])


# Entry 1 gets 1e30 at step 3, entry 2 NaN at step 5, entry 3 drifts away where decays are slow, and 0 and 4 stay.
LENGTH, HUGE, NOT_A_NUMBER = 12, 3, 5
INCREMENTS = np.tile([1.0, 1.0, 1.0, 0.4 * LIMIT, -1.0], (LENGTH, 1))
INCREMENTS[HUGE, 1], INCREMENTS[NOT_A_NUMBER, 2] = 1e30, np.nan


@every_value("wide, n, buffer", VALUES.values(), [2**16 - 1, 2**15, 1], [HEADS, DEFERRED])
def test_a_record_outlives_decays_and_increments(buffer, n, wide):
    @functools.partial(jax.jit, static_argnames="keeps")
    def train(keeps):
        def step(carry, x):
            (digits, z), (t, entry, increment) = carry, x
            digits, new = buffer.multiply_by(digits, z, jnp.int64(n), 2**16, entry)
            return (digits, new.add(increment, BITS, t, z if keeps else None)), None

        start = buffer.hold(Fixed.zeros_like(jnp.zeros(5), wide))
        entries = buffer.schedule(jnp.full(LENGTH, n), 2**16).entries
        steps = jnp.arange(LENGTH), entries, jnp.asarray(INCREMENTS)
        return jax.lax.scan(step, (buffer.empty(start.high, LENGTH), start), steps)[0][1]

    end, forgetful = train(keeps=True), train(keeps=False)
    each = each_overflow(end)
    drifts, total = LENGTH, 0.0
    for t in range(LENGTH):
        total = total * n / 2**16 + 0.4 * LIMIT
        drifts = min(drifts, t) if total >= LIMIT else drifts
    assert each.step.tolist() == [STEPS, HUGE, NOT_A_NUMBER, drifts if drifts < LENGTH else STEPS, STEPS]
    np.testing.assert_allclose(each.magnitude[1], 1e30, rtol=1e-6)
    assert np.isnan(each.magnitude[2])
    assert forgetful.high[0] == end.high[0]
    decoded = end.decode(BITS, jnp.float64)
    np.testing.assert_allclose(decoded[4], -decoded[0], rtol=1e-9)
    # A decay makes a value of a record, or a later one.
    assert int(first_overflow(forgetful).step) != int(first_overflow(end).step)
