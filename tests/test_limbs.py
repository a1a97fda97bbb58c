"""Values of two limbs: the laws of reversible multiplication again, with Python integers as the oracle."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hypergrad.exact import DEVICE, GMPY2, Wide, add, decode, schedule, subtract, widen
from hypergrad.exact.limbs import LOW_BITS
from hypergrad.exact.lost import plus, record


HIGH = np.array([0, -1, 1, 2**16, -(2**16) - 1, 2**60, -(2**60), 2**61 - 1, -(2**61) + 1])
LOW = np.array([0, 1, 2**16 - 1, 2**31, 2**46 - 1])
D = 2**16
STEPS = 70
N = np.random.default_rng(0).choice([1, 2, 3, 58982, 65470, 65535], STEPS)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def start() -> Wide:
    high, low = (x.ravel() for x in np.meshgrid(HIGH, LOW))
    return Wide(jnp.asarray(high), jnp.asarray(low))


def integers(c: Wide) -> list[int]:
    return [(int(h) << LOW_BITS) + int(low) for h, low in zip(c.high, c.low, strict=True)]


@functools.partial(jax.jit, static_argnums=1)
def on_device(c, capacity, turns):
    body = lambda x, t: (DEVICE.multiply_by(*x, t.n, D, t), x[1])  # noqa: E731
    back = lambda x, t: (x := DEVICE.divide_by(*x, t.n, D, t), x[1])  # noqa: E731
    end, before = jax.lax.scan(body, (DEVICE.empty(c.shape, capacity), c), turns)
    first, after = jax.lax.scan(back, end, turns, reverse=True)
    return end[1], before, first, after


def test_multiplication_is_undone_and_is_that_of_long_integers():
    plan = schedule(jnp.asarray(N), D)
    end, before, (buffer, c), after = on_device(start(), int(plan.words), plan.turns)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    jax.tree.map(np.testing.assert_array_equal, c, start())
    assert DEVICE.is_empty(buffer).all()
    # Until the first spill the device buffer is the unbounded one, and so are the digits that enter the values.
    until = int(np.argmax(plan.turns.spills))
    reference, value = GMPY2.empty(c.shape, None), start()
    for t in range(until):
        assert integers(jax.tree.map(lambda x, t=t: x[t], before)) == integers(value)
        reference, value = GMPY2.multiply_by(reference, value, N[t], D)
    for t in reversed(range(until)):
        reference, value = GMPY2.divide_by(reference, value, N[t], D)
    assert integers(value) == integers(start()) and GMPY2.is_empty(reference).all()
    assert until > 3 and end.high.dtype == jnp.int64 and end.low.dtype == jnp.int64


@hypothesis.given(
    low=hnp.arrays(np.int64, 9 * 5, elements=st.sampled_from([0, 1, -1, 2**46, -(2**46)]) | st.integers(-(2**62), 2**62)),
    high=hnp.arrays(np.int64, 9 * 5, elements=st.integers(-(2**61), 2**61)),
)
def test_a_sum_is_that_of_long_integers(low, high):
    total = jax.jit(plus)(start(), high, low, None)
    added = [(int(h) << LOW_BITS) + int(x) for h, x in zip(high, low, strict=True)]
    assert integers(total) == [a + b for a, b in zip(integers(start()), added, strict=True)]
    assert bool(jnp.all((total.low >= 0) & (total.low < 2**LOW_BITS)))


def test_the_low_limb_of_a_record_stays():
    old = Wide(jnp.stack([jnp.int64(7), record(3, jnp.float32(1e30))]), jnp.asarray([5, 5]))
    after = add(widen(jnp.zeros(2, jnp.int64)), jnp.full(2, 0.7), 40, 4, old)
    assert (after.low[0] != 5, after.low[1], after.high[1]) == (True, 5, old.high[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_sums_are_undone_and_keep_what_a_float_says(dtype):
    x = jnp.asarray([0.0, 1e-30, 1e-18, 3e-13, 1e-3, 0.7, 123.456, 4e6], dtype)
    c = widen(jnp.arange(8, dtype=jnp.int64) - 4)
    there = add(c, x, 40)
    jax.tree.map(np.testing.assert_array_equal, subtract(there, x, 40), c)
    np.testing.assert_allclose(decode(add(widen(c.high * 0), x, 40), 40, dtype), x, rtol=1e-6, atol=2.0**-86)


def test_what_no_value_can_hold_is_marked_out_of_range():
    marked = add(widen(jnp.zeros(3, jnp.int64)), jnp.asarray([jnp.nan, jnp.inf, 1e30]), 40)
    assert bool(jnp.all(jnp.abs(decode(marked, 40, jnp.float64)) >= 2.0**22))


def test_noise_of_a_decay_is_what_the_docstrings_say():
    """Up to d rho / sqrt(6 (1 - rho^2)) quanta of 2^-86, 7.7e-21 at rho = 0.999; half, as long as the heads are small."""
    steps, rho = 4000, 65470 / D
    plan = schedule(jnp.full(steps, 65470), D)

    @jax.jit
    def run(c):
        body = lambda x, t: (DEVICE.multiply_by(x[0], add(x[1], g2, 40), t.n, D, t), None)  # noqa: E731
        return jax.lax.scan(body, (DEVICE.empty(c.shape, None), c), plan.turns)[0][1]

    g2 = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, 500) * 1e-13)
    exact = g2 * rho * (1 - rho**steps) / (1 - rho)
    noise = float(jnp.std(decode(run(widen(jnp.zeros(500, jnp.int64))), 40, jnp.float64) - exact))
    assert 2e-21 < noise < 8e-21, noise
