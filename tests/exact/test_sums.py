"""Sums in which order does not matter: the same bits for any order and grouping, within one rounding of the exact mean."""

from fractions import Fraction
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import every_value
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hypergrad._isolation import unseen
from hypergrad.exact import SUM_BITS, TERMS, Offsets, Sum, exponent_of, power_of_two, sum_range, total


QUANTUM = 2.0 ** -(SUM_BITS + 48)
LIMIT = sum_range(SUM_BITS)


@jax.jit
def mean(x: Any, order: Any) -> tuple[Any, Sum]:
    """Of the rows of x, float [terms, ...], and the sum itself."""
    offsets = Offsets.of(SUM_BITS, unseen())
    total = jax.lax.fori_loop(0, len(x), lambda i, s: s.add(x[order[i]], len(x), offsets), Sum.zeros_like(x[0]))
    return total.mean(jnp.float64, len(x)), total


def exact(x: np.ndarray) -> list[Fraction]:
    return [sum(map(Fraction, column.tolist())) / len(x) for column in x.astype(np.float64).T]


@every_value("terms, dtype", [1, 2, 3, 16], [np.float32, np.float64])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=30)
def test_order_does_not_matter_and_the_mean_is_right(dtype: Any, terms: int, data: st.DataObject) -> None:
    width = 32 if dtype == np.float32 else 64
    largest = float(np.nextafter(dtype(LIMIT), dtype(0)))
    numbers = st.floats(-largest, largest, width=width) | st.floats(-(2.0**-40), 2.0**-40, width=width)
    x = data.draw(arrays(dtype, (terms, 5), elements=numbers))
    order = np.asarray(data.draw(st.permutations(range(terms))))
    found, total = jax.device_get(mean(x, np.arange(terms)))
    again, other = jax.device_get(mean(x, order))
    assert found.tobytes() == again.tobytes()
    assert total.high.tobytes() == other.high.tobytes() and total.low.tobytes() == other.low.tobytes()
    for got, want in zip(found, exact(x), strict=True):
        assert abs(Fraction(float(got)) - want) <= Fraction(terms * QUANTUM) + abs(want) * Fraction(2.0**-51)


@pytest.mark.parametrize("terms", [3, 1000])
def test_grouping_does_not_matter(terms: int) -> None:
    x = np.random.default_rng(0).normal(size=(terms, 7)) * 2.0 ** np.random.default_rng(1).integers(-60, 20, (terms, 7))
    offsets = Offsets.of(SUM_BITS, unseen())
    parts = np.array_split(np.arange(terms), 4)
    sums = [Sum.zeros_like(x[0])] * 4
    for k, rows in enumerate(parts):
        for row in rows:
            sums[k] = sums[k].add(jnp.asarray(x[row]), terms, offsets)
    whole = Sum(sum(s.high for s in reversed(sums)), sum(s.low for s in reversed(sums)))
    found = np.asarray(whole.mean(jnp.float64, terms))
    np.testing.assert_array_equal(found, mean(x, np.arange(terms))[0])
    np.testing.assert_allclose(found, [float(e) for e in exact(x)], rtol=1e-14, atol=terms * QUANTUM)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, LIMIT, -LIMIT, 1e30])
@pytest.mark.parametrize("how_often", [1, 3, 16])
def test_what_does_not_fit_is_no_number(bad: float, how_often: int) -> None:
    x = np.ones((16, 3), np.float32)
    x[:how_often, 1] = bad
    found = np.asarray(mean(x, np.arange(16))[0])
    assert np.isnan(found[1])
    np.testing.assert_array_equal(found[[0, 2]], 1)


def test_the_most_terms_do_not_wrap() -> None:
    x = jnp.asarray([np.nextafter(np.float32(LIMIT), np.float32(0)), -LIMIT / 2, np.nan], jnp.float32)
    offsets = Offsets.of(SUM_BITS, unseen())
    add = lambda i, s: s.add(x, TERMS, offsets)  # noqa: E731
    found = np.asarray(jax.lax.fori_loop(0, TERMS, add, Sum.zeros_like(x)).mean(jnp.float64, TERMS))
    np.testing.assert_array_equal(found[:2], np.asarray(x[:2], np.float64))
    assert np.isnan(found[2])


@pytest.mark.parametrize(("shape", "to"), [((1000,), ()), ((7, 30), (30,)), ((3, 4, 5), (4, 1)), ((), ()), ((5,), (1,))])
@pytest.mark.parametrize("unit", [1e-270, 1.0, 1e300])
def test_totals_in_no_order(shape: Any, to: Any, unit: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-30, 1, shape) * unit
    rows = np.sum(x, axis=tuple(range(x.ndim - len(to))), keepdims=False)
    axes = tuple(i for i, (a, b) in enumerate(zip(np.shape(rows), to, strict=True)) if a != b)
    added = jax.jit(lambda x: total(x, to))
    found = np.asarray(added(x))
    np.testing.assert_allclose(found, np.sum(rows, axis=axes, keepdims=True).reshape(to), rtol=1e-13, atol=1e-14 * unit)
    turned = x[tuple(slice(None, None, -1) for _ in shape)]
    if not to:
        assert np.asarray(added(turned)).tobytes() == found.tobytes()


def test_a_total_of_what_is_no_number() -> None:
    assert np.isnan(total(jnp.array([1.0, np.nan]), ())) and np.isnan(total(jnp.array([1.0, np.inf]), ()))
    assert total(jnp.array([[1.0, 2.0], [np.nan, 1.0]]), (2, 1)).ravel().tolist()[0] == 3
    np.testing.assert_allclose(total(jnp.array([[1e-30, 2e-30], [1e30, 1e30]]), (2, 1)), [[3e-30], [2e30]], rtol=1e-13)
    assert total(jnp.zeros((3, 0)), (3, 1)).tolist() == [[0], [0], [0]] and total(jnp.zeros(4), ()) == 0


@hypothesis.given(x=st.floats(2.0**-1000, 2.0**999))
def test_powers_of_two_are_those_of_numpy(x: float) -> None:
    found = jnp.asarray(x)
    assert found.dtype == jnp.float64
    exponent = int(exponent_of(found))
    assert exponent == np.frexp(x)[1]
    for sign in (1, -1):
        assert float(power_of_two(jnp.int32(sign * exponent))) == np.ldexp(1.0, sign * exponent)


@pytest.mark.parametrize("x", [0.0, np.inf, np.nan])
def test_what_is_no_size_has_the_unit_one(x: float) -> None:
    assert float(power_of_two(exponent_of(jnp.asarray(x)))) == 1


def test_programs_that_are_lowered_outside_have_them() -> None:
    """Compiled under the caller's setting, as those of users are."""
    with jax.enable_x64(False):

        @jax.jit
        def size(x: jax.Array) -> jax.Array:
            with jax.enable_x64(True):
                return power_of_two(exponent_of(x.astype(jnp.float64))).astype(jnp.float32)

        assert float(size(jnp.float32(5))) == 8


@pytest.mark.parametrize(("largest", "known"), [(2.0**999, True), (2.0**1000, False), (1e305, False), (np.inf, False)])
def test_a_total_of_what_is_too_large_is_nan(largest: float, known: bool) -> None:
    with jax.enable_x64(True):
        found = total(jnp.array([largest, largest / 4, -1.0]), ())
    assert float(found) == 1.25 * largest if known else np.isnan(found)
