"""Ratios n/d: what decays are rounded to, their derivatives, and exact division."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of
from extremes import DENOMINATORS, SMALLEST, numerators
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hypergrad.exact import (
    FINE_DENOMINATOR,
    MOMENTUM_DENOMINATOR,
    divide,
    kept_on_average,
    known_numerator,
    numerator,
    smallest_numerator,
    to_ratio,
)


pytestmark = pytest.mark.of_bits

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
    for r in (np.zeros_like(n), n - 1, rest % n):
        q, digit = jitted_divide(quotient * n + r, n)
        np.testing.assert_array_equal(q, quotient)
        np.testing.assert_array_equal(digit, r)


@some_of("d", DENOMINATORS, 2**12, 2**16)
@hypothesis.given(data=st.data())
def test_ratio_and_numerator_are_inverse(d, data):
    n = data.draw(hnp.arrays(np.int64, 8, elements=numerators(d)))
    for dtype in (jnp.float32, jnp.float64):  # 24 bits are exact in both
        ratio = to_ratio(jnp.asarray(n / d, dtype), d)
        assert ratio.dtype == dtype
        np.testing.assert_array_equal(np.asarray(ratio, np.float64), n / d)
        np.testing.assert_array_equal(numerator(ratio, d), n)


def test_denominators_are_the_documented_ones():
    assert (MOMENTUM_DENOMINATOR, FINE_DENOMINATOR) == (2**16, 2**24)
    assert {d: smallest_numerator(d) for d in DENOMINATORS} == SMALLEST


def test_ratio_is_rounded_and_its_derivative_is_one():
    with jax.enable_x64(False):
        value, slope = jax.value_and_grad(lambda rho: to_ratio(rho, 2**16))(0.9)
    assert float(value) * 2**16 == 58982 and 0.9 * 2**16 == pytest.approx(58982.4)
    assert float(slope) == 1.0


def test_numerators_out_of_range_are_clipped_so_that_division_stays_defined():
    n = np.asarray(numerator(jnp.array([-1.0, 0.0, 1e-9, 1.0, 2.0, jnp.nan]), 2**16)).tolist()
    assert n[:-1] == [1, 1, 1, 2**16, 2**16]
    assert 1 <= n[-1] <= 2**16  # NaN: anything but a division by zero


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@hypothesis.given(rho=hnp.arrays(np.float64, 20, elements=st.floats(-0.5, 1.5) | st.sampled_from([np.nan, 0.0, 1.0])))
@hypothesis.settings(max_examples=40)
def test_a_numerator_known_beforehand_is_that_of_the_program(dtype, rho):
    for d in DENOMINATORS:
        program = numerator(to_ratio(jnp.asarray(rho, dtype), d, may_be_one=True), d)
        np.testing.assert_array_equal(known_numerator(rho.astype(dtype), d), program)


LITTLE = (
    st.floats(0, 1e-9) | st.floats(0, 1e-6) | st.floats(0, 0.9) | st.sampled_from([0.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24])
)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@hypothesis.given(lost=hnp.arrays(np.float64, (40, 2), elements=LITTLE), alike=st.booleans())
@hypothesis.settings(max_examples=60)
def test_what_is_lost_on_average_adds_up_to_what_it_stands_for(dtype, lost, alike):
    given = np.broadcast_to(lost[:1], lost.shape).astype(dtype) if alike else lost.astype(dtype)
    n = np.asarray(kept_on_average(jnp.asarray(given), 2**24), np.float64) * 2**24
    assert (n == np.round(n)).all() and (n >= 0).all() and (n <= 2**24).all()
    off = np.cumsum(2**24 - n, axis=0) - np.cumsum(given.astype(np.float64) * 2**24, axis=0)
    assert np.abs(off).max() <= 0.5 + 1e-6
    assert np.abs(2**24 - n - given * 2.0**24).max() <= 1


def test_what_is_lost_on_average_has_the_slope_of_what_it_stands_for():
    slopes = jax.jacobian(lambda lost: kept_on_average(lost * jnp.ones(5), 2**24))(jnp.float32(1e-8))
    np.testing.assert_array_equal(slopes, -1)


@pytest.mark.parametrize("lost", [-1e-3, 1.0, 1.5, np.nan])
def test_what_no_ratio_stands_for_stays_as_it_is(lost):
    """So that it can be reported; what comes before does not see it."""
    kept = np.asarray(kept_on_average(jnp.asarray([1e-8, lost, 1e-8], jnp.float32), 2**24))
    np.testing.assert_array_equal(kept, np.asarray([1, 1 - np.float32(lost), kept[2]], np.float32))
