"""The fixed-point grid: symmetric, exact to add and subtract on, and nothing leaves its range unseen."""

import fractions
import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hypergrad.exact import STEPS, add, decode, default_fraction_bits, encode, first_lost, grid_range, subtract


GRIDS = [(np.float64, 52), (np.float32, 48), (np.float32, 44), (np.float64, 60)]
SIZE = 16

jitted_encode = jax.jit(encode, static_argnums=1)
jitted_decode = jax.jit(decode, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=2)
def there_and_back(z, increment, bits):
    after = add(z, increment, bits, STEP)
    return after, subtract(after, increment, bits)


each_lost = jax.jit(jax.vmap(first_lost))
STEP = 7


def floats(dtype: type, limit: float) -> st.SearchStrategy[float]:
    """Below `limit` in magnitude, its neighbours and tiny numbers among them."""
    edge = float(np.nextafter(dtype(limit), dtype(0)))
    edges = st.sampled_from([0.0, -0.0, edge, -edge, 2.0**-60, -(2.0**-60)])
    return edges | st.floats(-edge, edge, width=np.dtype(dtype).itemsize * 8, allow_subnormal=False)


def quanta(x: float, bits: int) -> int:
    """trunc(x 2^bits), in exact arithmetic."""
    return math.trunc(fractions.Fraction(x) * 2**bits)


@pytest.mark.parametrize(("dtype", "bits"), GRIDS)
@hypothesis.given(data=st.data())
def test_encode_truncates_both_signs_alike(dtype, bits, data):
    x = data.draw(hnp.arrays(dtype, SIZE, elements=floats(dtype, grid_range(bits))))
    with jax.enable_x64(True):
        z = np.asarray(jitted_encode(x, bits))
        np.testing.assert_array_equal(jitted_encode(-x, bits), -z)
        back = np.asarray(jitted_decode(z, bits, np.float64))
    assert z.tolist() == [quanta(v, bits) for v in x.tolist()]
    assert (np.abs(x - back) <= np.maximum(2.0**-bits, np.abs(x) * 2.0**-52)).all()


@pytest.mark.parametrize(("dtype", "bits"), GRIDS)
@hypothesis.given(data=st.data())
def test_subtract_undoes_add(dtype, bits, data):
    # |z| and |increment| below 2^61 quanta: the sum is in range, and no float rounds it up to the limit.
    z = data.draw(hnp.arrays(np.int64, SIZE, elements=st.integers(2**40 - 2**61, 2**61 - 2**40)))
    increment = data.draw(hnp.arrays(dtype, SIZE, elements=floats(dtype, grid_range(bits) / 2)))
    with jax.enable_x64(True):
        after, back = there_and_back(z, increment, bits)
    assert np.asarray(after).tolist() == [a + quanta(b, bits) for a, b in zip(z.tolist(), increment.tolist(), strict=True)]
    np.testing.assert_array_equal(back, z)


@pytest.mark.parametrize(("dtype", "bits"), GRIDS)
@pytest.mark.parametrize("z", [0, 1, -1, 2**62 - 1, 1 - 2**62])
def test_increments_that_no_grid_value_holds_are_recorded_wherever_they_land(dtype, bits, z):
    limit = grid_range(bits)
    lost = np.array([math.nan, math.inf, -math.inf, limit, -limit, 1e30, -1e30], dtype)
    with jax.enable_x64(True):
        after, _ = there_and_back(np.full(lost.shape, z), lost, bits)
        found = each_lost(after)
    assert (np.asarray(found.step) == STEP).all()
    np.testing.assert_array_equal(found.magnitude, np.abs(lost).astype(np.float32))


@pytest.mark.parametrize(("dtype", "bits"), GRIDS)
@hypothesis.given(data=st.data())
def test_sums_out_of_range_are_recorded_and_never_wrap(dtype, bits, data):
    # Both below 2^62 quanta in magnitude: the sum is below 2^63 and fits, and its size is known before it is replaced.
    ends = st.sampled_from([2**62 - 1, 1 - 2**62, 2**61, -(2**61)]) | st.integers(1 - 2**62, 2**62 - 1)
    z = data.draw(hnp.arrays(np.int64, SIZE, elements=ends))
    increment = data.draw(hnp.arrays(dtype, SIZE, elements=floats(dtype, grid_range(bits))))
    with jax.enable_x64(True):
        after, _ = there_and_back(z, increment, bits)
        found = jax.tree.map(np.asarray, each_lost(after))
    sums = [a + quanta(b, bits) for a, b in zip(z.tolist(), increment.tolist(), strict=True)]
    for total, value, step, size in zip(sums, np.asarray(after).tolist(), found.step, found.magnitude, strict=True):
        assert (value, step) == (total, STEPS) if step != STEP else abs(total) >= 2**62 - 2**39  # floats round up to it
        assert abs(total) < 2**62 or step == STEP
        assert step != STEP or abs(size - abs(total) / 2**bits) <= 1e-6 * size


def test_ranges_are_the_documented_ones():
    assert (default_fraction_bits(np.float64), grid_range(52)) == (52, 1024.0)
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        assert (default_fraction_bits(dtype), grid_range(48)) == (48, 16384.0)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_is_held_exactly(dtype):
    # 2^48 times a float16 overflows its range: the scaling is done in float32.
    x = jnp.array([1.0, -1.5, 3.140625, 2.0**-14, -100.0], dtype)
    with jax.enable_x64(True):
        z = encode(x, 48)
        back = decode(z, 48, dtype)
    assert np.asarray(z).tolist() == [quanta(float(v), 48) for v in x]
    np.testing.assert_array_equal(np.asarray(back, np.float32), np.asarray(x, np.float32))
