"""Laws of values that left their range: a record says when and how large, stays, and the first one is found."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hypergrad.exact import DEFERRED, DEVICE, STEPS, Wide, add, decode, first_lost, grid_range, widen
from hypergrad.exact.lost import record


BITS, LIMIT = 48, grid_range(48)
IN_RANGE = st.integers(1 - 2**62, 2**62 - 1)
MAGNITUDES = st.sampled_from([0.0, LIMIT, 1e30, float("inf"), float("nan")]) | st.floats(0, width=32, allow_subnormal=False)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@hypothesis.given(
    values=hnp.arrays(np.int64, 9, elements=IN_RANGE),
    lost=st.dictionaries(st.integers(0, 8), st.tuples(st.integers(-1, STEPS - 1), MAGNITUDES)),
)
def test_the_first_record_is_found_among_values_and_later_ones(values, lost):
    for entry, (step, magnitude) in lost.items():
        values[entry] = record(step, jnp.float32(magnitude))
    found = first_lost(jnp.asarray(values))
    if not lost:
        assert int(found.step) == STEPS
        return
    entry = min(lost, key=lambda i: (lost[i][0], i))
    assert (int(found.step), int(found.entry)) == (lost[entry][0], entry)
    np.testing.assert_array_equal(found.magnitude, np.float32(lost[entry][1]))


def test_nothing_has_lost_nothing():
    assert int(first_lost(jnp.zeros((0,), jnp.int64)).step) == STEPS


# Entry 1 gets 1e30 at step 3, entry 2 NaN at step 5, entry 3 drifts away where decays are slow, and 0 and 4 stay.
LENGTH, HUGE, NOT_A_NUMBER = 12, 3, 5
INCREMENTS = np.tile([1.0, 1.0, 1.0, 0.4 * LIMIT, -1.0], (LENGTH, 1))
INCREMENTS[HUGE, 1], INCREMENTS[NOT_A_NUMBER, 2] = 1e30, np.nan


@pytest.mark.parametrize("wide", [False, True], ids=["int64", "wide"])
@pytest.mark.parametrize("n", [2**16 - 1, 2**15, 1])
@pytest.mark.parametrize("keep", [DEVICE, DEFERRED], ids=["heads", "waiting"])
def test_a_record_outlives_decays_and_increments(keep, n, wide):
    @functools.partial(jax.jit, static_argnames="holds")
    def train(holds):
        def step(carry, x):
            (buffer, z), (t, turn, increment) = carry, x
            buffer, new = keep.multiply_by(buffer, z, jnp.int64(n), 2**16, turn)
            return (buffer, add(new, increment, BITS, t, z if holds else None)), None

        zero = jnp.zeros(5, jnp.int64)
        start = keep.empty((5,), LENGTH), keep.hold(widen(zero) if wide else zero)
        turns = keep.schedule(jnp.full(LENGTH, n), 2**16).turns
        return jax.lax.scan(step, start, (jnp.arange(LENGTH), turns, jnp.asarray(INCREMENTS)))[0][1]

    end = train(holds=True)
    each = jax.vmap(first_lost)(_limb(end))
    drifts, total = LENGTH, 0.0
    for t in range(LENGTH):
        total = total * n / 2**16 + 0.4 * LIMIT
        drifts = min(drifts, t) if total >= LIMIT else drifts
    assert each.step.tolist() == [STEPS, HUGE, NOT_A_NUMBER, drifts if drifts < LENGTH else STEPS, STEPS]
    np.testing.assert_allclose(each.magnitude[1], 1e30, rtol=1e-6)
    assert np.isnan(each.magnitude[2])
    np.testing.assert_array_equal(_limb(train(holds=False))[0], _limb(end)[0])
    np.testing.assert_allclose(decode(end, BITS, jnp.float64)[4], -decode(end, BITS, jnp.float64)[0], rtol=1e-9)
    # A decay makes a value of a record, or a later one.
    assert int(first_lost(train(holds=False)).step) != int(first_lost(end).step)


def _limb(z):
    z = z.z if hasattr(z, "z") else z
    return z.high if isinstance(z, Wide) else z
