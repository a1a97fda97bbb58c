"""Numbers of the grid: symmetric, exact to add and subtract on, of one limb or two, with or without a scale."""

import fractions

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import every_value, some_of
from extremes import (
    GRIDS,
    LARGEST,
    LOW,
    SCALES,
    SIZE,
    VALUES,
    add_and_subtract,
    extremes,
    fixed,
    floats,
    integers,
    numerators,
    quanta,
    scaled,
)
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hypergrad.exact import (
    DEFERRED,
    LOW_BITS,
    STEPS,
    WORD_BITS,
    Fixed,
    Overflow,
    all_of,
    default_fraction_bits,
    encode,
    grid_range,
)


pytestmark = pytest.mark.of_bits

HIGH = [0, -1, 1, 2**16, -(2**16) - 1, 2**60, -(2**60), 2**61 - 1, -(2**61) + 1]

jitted_encode = jax.jit(encode, static_argnums=1)
jitted_decode = jax.jit(Fixed.decode, static_argnums=(1, 2))


@some_of(("dtype", "bits"), GRIDS, (np.float32, 44), (np.float64, 60))
@hypothesis.given(data=st.data())
def test_encode_truncates_both_signs_alike(dtype, bits, data):
    x = data.draw(hnp.arrays(dtype, SIZE, elements=floats(dtype, grid_range(bits))))
    z = np.asarray(jitted_encode(x, bits))
    np.testing.assert_array_equal(jitted_encode(-x, bits), -z)
    back = np.asarray(jitted_decode(Fixed(z), bits, np.float64))
    assert z.tolist() == [quanta(v, bits) for v in x.tolist()]
    assert (np.abs(x - back) <= np.maximum(2.0**-bits, np.abs(x) * 2.0**-52)).all()


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_is_held_exactly(dtype):
    # 2^48 times a float16 overflows its range: the scaling is done in float32.
    x = jnp.array([1.0, -1.5, 3.140625, 2.0**-14, -100.0], dtype)
    z = encode(x, 48)
    assert np.asarray(z).tolist() == [quanta(float(v), 48) for v in x]
    np.testing.assert_array_equal(np.asarray(Fixed(z).decode(48, dtype), np.float32), np.asarray(x, np.float32))


def test_ranges_are_the_documented_ones():
    assert (default_fraction_bits(np.float64), grid_range(52)) == (52, 1024.0)
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        assert (default_fraction_bits(dtype), grid_range(48)) == (48, 16384.0)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("wide", VALUES.values(), ids=VALUES)
def test_a_value_is_what_its_limbs_and_scale_say(wide, scale):
    x = fixed(HIGH, wide, scale)
    unit = fractions.Fraction(scale or 1) / 2 ** (48 + LOW_BITS * wide)
    expected = [float(z * unit) for z in integers(x)]
    np.testing.assert_allclose(jitted_decode(x, 48, np.float64), expected, rtol=2.0**-51)
    np.testing.assert_array_equal(jitted_decode(x, 48, np.float32), jitted_decode(x, 48, np.float64).astype(np.float32))


@every_value("grid, wide, scale", GRIDS, VALUES.values(), SCALES.values())
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40)
def test_subtract_undoes_add(grid, wide, scale, data):
    dtype, bits = grid
    # |x| and |increment| below half of the range: the sum is in range, and no float rounds it up to the limit.
    largest = int((2**61 - 2**40) / (scale or 1))
    high = data.draw(hnp.arrays(np.int64, SIZE, elements=extremes(2**16, largest)))
    low = data.draw(hnp.arrays(np.int64, SIZE, elements=st.sampled_from(LOW) | st.integers(0, 2**46 - 1))) if wide else None
    x = scaled(Fixed(high, low), scale)
    increment = data.draw(hnp.arrays(dtype, SIZE, elements=floats(dtype, grid_range(bits) * 0.499)))
    after, back = add_and_subtract(x, increment, bits)
    jax.tree.map(np.testing.assert_array_equal, back, x)
    if not wide and scale is None:
        assert integers(after) == [a + quanta(b, bits) for a, b in zip(integers(x), increment.tolist(), strict=True)]
    else:  # rounded once, in a float64
        unit = fractions.Fraction(scale or 1) / 2 ** (bits + LOW_BITS * wide)
        for new, old, b in zip(integers(after), integers(x), map(fractions.Fraction, increment.tolist()), strict=True):
            assert abs((new - old) * unit - b) <= unit / 2 + abs(b) / 2**51
    assert (np.asarray(Overflow.of(*after.first_record()).step) == STEPS).all()


@pytest.mark.parametrize("wide", VALUES.values(), ids=VALUES)
def test_increments_are_rounded_to_quanta_of_the_scale(wide):
    x = DEFERRED.hold(Fixed.zeros_like(jnp.zeros(4), wide))
    quantum = 2.0 ** (WORD_BITS - 48 - (LOW_BITS if wide else 0))
    there = x.add(jnp.asarray([0.4, 0.6, -0.6, 3.0], jnp.float64) * quantum, 48)
    np.testing.assert_array_equal(there.decode(48, jnp.float64) / quantum, [0, 1, -1, 3])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_wide_sums_keep_what_a_float_says(dtype):
    x = jnp.asarray([0.0, 1e-30, 1e-18, 3e-13, 1e-3, 0.7, 123.456, 4e6], dtype)
    zero = Fixed.zeros_like(x, wide=True)
    np.testing.assert_allclose(zero.add(x, 40).decode(40, dtype), x, rtol=1e-6, atol=2.0**-86)
    c = zero._replace(high=jnp.arange(8, dtype=jnp.int64) - 4)
    jax.tree.map(np.testing.assert_array_equal, c.add(x, 40).subtract(x, 40), c)


@hypothesis.given(
    low=hnp.arrays(np.int64, 9 * 5, elements=st.sampled_from([0, 1, -1, 2**46, -(2**46)]) | st.integers(-(2**62), 2**62)),
    high=hnp.arrays(np.int64, 9 * 5, elements=st.integers(-(2**61), 2**61)),
)
def test_a_wide_sum_is_that_of_long_integers(low, high):
    x, there, back = fixed(HIGH, wide=True), jax.jit(Fixed._plus), jax.jit(Fixed._minus)
    total, added = there(x, high, low), [(int(h) << LOW_BITS) + int(v) for h, v in zip(high, low, strict=True)]
    assert integers(total) == [a + b for a, b in zip(integers(x), added, strict=True)]
    assert bool(jnp.all((total.low >= 0) & (total.low < 2**LOW_BITS)))
    jax.tree.map(np.testing.assert_array_equal, back(total, high, low), x)


jitted_times = jax.jit(Fixed.times)
jitted_over = jax.jit(lambda x, n: x.over(n, lambda f, *args: f(*args)))


@pytest.mark.parametrize("wide", VALUES.values(), ids=VALUES)
@hypothesis.given(data=st.data())
def test_integer_operations_are_those_of_long_integers_and_inverse(wide, data):
    high = data.draw(hnp.arrays(np.int64, SIZE, elements=extremes(2**16, LARGEST)))
    low = data.draw(hnp.arrays(np.int64, SIZE, elements=st.sampled_from(LOW) | st.integers(0, 2**46 - 1))) if wide else None
    n = data.draw(hnp.arrays(np.int64, SIZE, elements=numerators(2**16)))
    rest = np.where(data.draw(hnp.arrays(bool, SIZE)), n - 1, data.draw(hnp.arrays(np.int64, SIZE, elements=st.just(0))))
    x = Fixed(jnp.asarray(high), None if low is None else jnp.asarray(low))
    for k in (1, 12, 16):
        quotient, digit = x.split(k)
        assert integers(quotient) == [c >> k for c in integers(x)]
        assert digit.tolist() == [c % 2**k for c in integers(x)]
        jax.tree.map(np.testing.assert_array_equal, quotient.join(digit, k), x)
        nearest, rest_of_it = x.split_nearest(k)
        jax.tree.map(np.testing.assert_array_equal, nearest.join(rest_of_it, k), x)
        if not wide:
            assert integers(nearest) == [(c + 2 ** (k - 1)) >> k for c in integers(x)]
            np.testing.assert_array_equal(x.near(digit, 2**k), rest_of_it)
    added = np.asarray(x.near(rest, n))
    product = jitted_times(quotient, n, added)  # below 2^62: divided by 2^16 before
    assert integers(product) == [c * int(k) + int(r) for c, k, r in zip(integers(quotient), n, added, strict=True)]
    assert wide or (2 * np.abs(added) <= n).all()
    back, digit = jitted_over(product, n)
    jax.tree.map(np.testing.assert_array_equal, back, quotient)
    np.testing.assert_array_equal(digit, rest)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("wide", VALUES.values(), ids=VALUES)
def test_values_are_equal_entry_by_entry_in_every_limb(wide, scale):
    x = fixed(HIGH, wide, scale)
    assert x.equals(x).all() and x.equals(x).shape == x.shape
    for name in ("high", "low") if wide else ("high",):
        other = x._replace(**{name: getattr(x, name).at[3].add(1)})
        assert np.flatnonzero(~np.asarray(x.equals(other))).tolist() == [3]
    other = jax.tree.map(lambda limb: limb + 1, x)
    chosen = x.where(jnp.arange(x.high.size) == 3, other)
    assert np.flatnonzero(np.asarray(chosen.equals(x))).tolist() == [3]
    assert np.flatnonzero(~np.asarray(chosen.equals(other))).tolist() == [3]
    jax.tree.map(np.testing.assert_array_equal, chosen.scale, x.scale)


@pytest.mark.parametrize("wide", VALUES.values(), ids=VALUES)
def test_zeros_have_the_shape_and_the_sharding_of_what_they_are_like(wide):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("weights",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("weights"))
    zeros = Fixed.zeros_like(jax.device_put(jnp.ones(4, jnp.float32), sharding), wide)
    assert (zeros.low is not None, zeros.scale) == (wide, None) and zeros.shape == (4,)
    for limb in jax.tree.leaves(zeros):
        assert limb.dtype == jnp.int64 and limb.sharding == sharding and not limb.any()


@pytest.mark.parametrize("flags", [[], [True, True], [True, False], [[False], [False]]])
def test_all_of_is_all(flags):
    assert bool(all_of(jnp.asarray(flags, bool))) == np.all(np.asarray(flags, bool))
