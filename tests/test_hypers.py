"""Domains: natural units come back, every stored value lies inside, and what lies outside is refused by name."""

import math
import re

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import every_value
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import hypergrad as hg
from hypergrad.hypers import at_bounds


LOW, HIGH = -3.0, 5.0
MARGIN = 2.0**-16
KEY = jax.random.key(0)
ANY_STORED = hnp.arrays(np.float32, 8, elements=st.floats(-80, 80, width=32, allow_subnormal=False))


def floats(low: float, high: float) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float64, 8, elements=st.floats(low, high))


@hypothesis.given(floats(1e-30, 1e30))
def test_positive_comes_back(x):
    with jax.enable_x64(True):
        # exp(log x) doubles the rounding of log x, |log x| 2^-53 < 70 2^-53, and adds its own.
        np.testing.assert_allclose(hg.natural(hg.positive(x)), x, rtol=1e-14)


@hypothesis.given(floats(2 * MARGIN, 1 - 2 * MARGIN))
def test_unit_interval_comes_back(x):
    with jax.enable_x64(True):
        np.testing.assert_allclose(hg.natural(hg.unit_interval(x)), x, rtol=1e-11)


@hypothesis.given(floats(LOW + 1e-3, HIGH - 1e-3))
def test_bounded_comes_back(x):
    with jax.enable_x64(True):
        np.testing.assert_allclose(hg.natural(hg.bounded(x, LOW, HIGH)), x, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "x"), [(hg.positive, 0.3), (hg.unit_interval, 0.9), (lambda x: hg.bounded(x, LOW, HIGH), -1.0)]
)
def test_float32_comes_back_to_rounding(make, x):
    stored = make(jnp.float32(x))
    assert hg.natural(stored).dtype == jnp.float32
    np.testing.assert_allclose(hg.natural(stored), x, rtol=1e-6)


def with_stored(domain, u):
    """`domain` with other stored values: what a meta-optimizer makes of it."""
    return jax.tree.map(lambda _: jnp.asarray(u), domain)


@hypothesis.given(ANY_STORED)
def test_every_stored_value_lies_inside(u):
    assert (hg.natural(with_stored(hg.positive(1.0), u)) > 0).all()
    unit = np.asarray(hg.natural(with_stored(hg.unit_interval(0.5), u)))
    assert (unit >= MARGIN).all() and (unit <= 1 - MARGIN).all()
    inside = np.asarray(hg.natural(with_stored(hg.bounded(0.5, LOW, HIGH), u)))
    assert (inside >= LOW).all() and (inside <= HIGH).all()


def test_every_stored_unit_interval_value_is_a_momentum():
    # The ends of the interval are the smallest and the largest decay that n/2^16 can represent.
    momenta = hg.natural(with_stored(hg.unit_interval(0.5), jnp.array([-100.0, 0.0, 100.0])))
    loss = lambda params, theta, batch: jnp.sum(params**2)  # noqa: E731
    trained = hg.train(loss, jnp.ones(2), hg.SGD(0.1, hg.PerStep(momenta)), hg.full_batch(jnp.ones(1)), steps=3)
    assert int(trained.status.code) == 0


@pytest.mark.parametrize("make", [hg.positive, hg.unit_interval, lambda x: hg.bounded(x, 0.0, 1.0)])
def test_per_step_goes_inside_a_domain(make):
    values = jnp.array([0.2, 0.4, 0.8])
    natural = hg.natural(make(hg.PerStep(values)))
    assert isinstance(natural, hg.PerStep)
    np.testing.assert_allclose(natural.values, values, rtol=1e-6)


def test_natural_of_nested_trees():
    hypers = {
        "bare": jnp.array([1.0, -2.0]),
        "optimizer": hg.SGD(hg.positive(hg.PerStep(jnp.array([0.1, 0.2]))), hg.unit_interval({"w": 0.9, "b": 0.5})),
        "list": [hg.bounded(0.5, 0.0, 1.0), (hg.fixed(3), None)],
    }
    natural = hg.natural(hypers)
    np.testing.assert_array_equal(natural["bare"], hypers["bare"])
    assert isinstance(natural["optimizer"], hg.SGD)
    np.testing.assert_allclose(natural["optimizer"].learning_rate.values, [0.1, 0.2], rtol=1e-6)
    np.testing.assert_allclose(natural["optimizer"].momentum["b"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(natural["list"][0], 0.5, rtol=1e-6)
    assert int(natural["list"][1][0]) == 3 and natural["list"][1][1] is None


def test_gradient_flows_through_natural():
    # d exp(u)/du = x; d sigmoid/du = p (1 - p), times the width of the interval.
    hypers = {"a": hg.positive(0.3), "b": hg.bounded(2.0, LOW, HIGH), "c": hg.unit_interval(0.9), "d": jnp.array(0.7)}
    grads = jax.grad(lambda h: sum(hg.natural(h).values()))(hypers)
    p, q = (2.0 - LOW) / (HIGH - LOW), (0.9 - MARGIN) / (1 - 2 * MARGIN)
    expected = [0.3, (HIGH - LOW) * p * (1 - p), (1 - 2 * MARGIN) * q * (1 - q), 1.0]
    assert jax.tree.structure(grads) == jax.tree.structure(hypers)
    np.testing.assert_allclose(jax.tree.leaves(grads), expected, rtol=1e-5)


def test_no_gradient_flows_into_fixed():
    hypers = {"a": hg.fixed(2.0), "b": jnp.array(3.0)}
    grads = jax.grad(lambda h: hg.natural(h)["a"] * hg.natural(h)["b"])(hypers)
    assert float(grads["a"].unconstrained) == 0.0 and float(grads["b"]) == 2.0


def test_fixed_is_untouched():
    leaves = {"name": "relu", "function": jnp.tanh, "count": 7, "array": jnp.array([1, 2]), "x": 0.5, "none": None}
    natural = hg.natural(hg.fixed(leaves))
    assert natural["name"] == "relu" and natural["function"] is jnp.tanh and natural["none"] is None
    assert int(natural["count"]) == 7 and float(natural["x"]) == 0.5
    np.testing.assert_array_equal(natural["array"], leaves["array"])


def test_optimize_leaves_fixed_alone():
    hypers = {"scale": hg.fixed(3.0), "x": 1.0}
    result = hg.optimize(lambda h, key: h["scale"] * h["x"], lambda y: y**2, hypers, meta_steps=2)
    assert float(result.hypers["scale"].unconstrained) == 3.0 and float(result.hypers["x"]) < 1.0


@pytest.mark.parametrize("x", [0, 0.0, -1, -1e-9, float("nan")])
def test_positive_refuses(x):
    with pytest.raises(ValueError, match=rf"hg\.positive.* must be finite and > 0; got {x}"):
        hg.positive(x)


@pytest.mark.parametrize("x", [0, 1, 0.0, 1.0, -0.5, 1.5, 1 - 2.0**-20, 2.0**-16, float("nan")])
def test_unit_interval_refuses(x):
    with pytest.raises(ValueError, match=rf"hg\.unit_interval.* must be strictly between 1.52588e-05 .*; got {x}"):
        hg.unit_interval(x)


@pytest.mark.parametrize("x", [-4.0, -3.0, 5.0, 6.0, float("nan")])
def test_bounded_refuses_what_lies_outside(x):
    with pytest.raises(ValueError, match=rf"hg\.bounded.* must be strictly between -3 and 5; got {x}"):
        hg.bounded(x, LOW, HIGH)


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (1.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0)])
def test_bounded_refuses_empty_and_infinite_intervals(low, high):
    with pytest.raises(ValueError, match=rf"hg\.bounded needs finite low < high; got low={low}, high={high}"):
        hg.bounded(0.5, low, high)


def test_the_leaf_and_the_index_are_named():
    with pytest.raises(
        ValueError, match=r"hg\.positive: leaf \['a'\]\['b'\].* must be finite and > 0; got 0.0 at index \(0, 1\)"
    ):
        hg.positive({"a": {"b": jnp.array([[1.0, 0.0]])}, "c": 1.0})
    with pytest.raises(ValueError, match=r"hg\.unit_interval.*got 1.0 at index \(2,\)"):
        hg.unit_interval(hg.PerStep(jnp.array([0.5, 0.3, 1.0])))


@pytest.mark.parametrize("x", ["0.1", 1j, jnp.tanh])
@pytest.mark.parametrize("make", [hg.positive, hg.unit_interval, lambda x: hg.bounded(x, 0.0, 1.0)])
def test_what_is_no_real_number_is_refused(make, x):
    with pytest.raises(TypeError, match="a hyperparameter is a float or an array of floats"):
        make({"a": x})


@every_value("u, dtype", [-1e4, -100.0, 100.0, 1e4], [jnp.float16, jnp.bfloat16, jnp.float32])
def test_no_stored_value_leaves_its_domain(dtype, u):
    """In the numbers of its own type; and positive ones have a way back."""
    within = {"positive": (0, np.inf), "unit_interval": (MARGIN, 1 - MARGIN), "bounded": (0.1, 0.7)}
    for domain in (hg.positive(dtype(0.5)), hg.unit_interval(dtype(0.5)), hg.bounded(dtype(0.5), 0.1, 0.7)):
        moved = with_stored(domain, dtype(min(u, 6e4)))
        value, slope = jax.value_and_grad(lambda d: hg.natural(d).astype(jnp.float32))(moved)
        low, high = within[domain.kind]
        assert value.dtype == jnp.float32 and low <= float(value) <= high and np.isfinite(value)
        assert np.isfinite(slope.unconstrained) and (slope.unconstrained > 0) == (domain.kind == "positive")
        (said,) = at_bounds({"a": moved})
        assert ("lower" if u < 0 else "upper") in said


@pytest.mark.parametrize("value", [jnp.float16(1e-5), jnp.float16(3e-5), np.float16(5.9e-5)])
def test_what_the_type_of_a_positive_number_does_not_have_is_refused(value):
    with pytest.raises(ValueError, match=r"hg.positive: .* cannot be told from an end of \(6.10352e-05, 65504\) in float16"):
        hg.positive(value)


def test_what_is_stored_may_be_a_number_of_python():
    for domain in (hg.positive(0.1), hg.unit_interval(0.5), hg.bounded(0.5, 0.0, 1.0)):
        moved = with_stored(domain, 0.25)
        np.testing.assert_array_equal(hg.natural(moved), hg.natural(with_stored(domain, jnp.float32(0.25))))
        assert at_bounds({"a": moved}) == ()


def test_another_start_takes_one_key_and_one_scale():
    for key, error, text in (
        (0, TypeError, "must be a JAX key"),
        (jax.random.split(KEY, 3), ValueError, "one key; got keys"),
    ):
        with pytest.raises(error, match=text):
            hg.scatter({"a": 0.1}, key)
    with pytest.raises(TypeError, match="`scale` of hg.scatter must be one real number; got float32"):
        hg.scatter({"a": 0.1}, KEY, jnp.ones(2))


def test_no_value_of_an_interval_is_above_its_end():
    for low, high in ((0.54, 0.94), (0.3, 0.42), (0.03, 0.12)):
        domain = with_stored(hg.bounded(jnp.float32((low + high) / 2), low, high), jnp.float32(40.0))
        value, slope = jax.value_and_grad(lambda d: hg.natural(d))(domain)
        assert value <= np.float32(high) and np.isfinite(jnp.log(np.float32(high) - value + 1e-30))
        assert slope.unconstrained >= 0
    u = jnp.float32(3.0)
    slope = jax.grad(lambda d: hg.natural(d))(with_stored(hg.bounded(0.7, 0.54, 0.94), u)).unconstrained
    np.testing.assert_allclose(slope, 0.4 * jax.nn.sigmoid(u) * jax.nn.sigmoid(-u), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda x: hg.positive(x), r"hg\.positive is a domain already, fixed"),
        (lambda x: hg.positive({"a": x}), r"hg\.positive\['a'\] is a domain already"),
        (lambda x: hg.unit_interval(x), r"hg\.unit_interval is a domain already"),
        (lambda x: hg.bounded(x, 0.0, 1.0), r"hg\.bounded is a domain already"),
        (lambda x: hg.fixed([x]), r"hg\.fixed\[0\] is a domain already"),
    ],
)
def test_a_hyperparameter_has_one_domain(make, where):
    with pytest.raises(TypeError, match=where):
        make(hg.fixed(0.1))


def test_ends_of_an_interval_may_be_known_arrays():
    assert hg.bounded(0.5, jnp.float32(0), np.float32(1)) == hg.bounded(0.5, 0, 1)


def test_ends_of_an_interval_are_python_numbers():
    with pytest.raises(TypeError, match=r"hg\.bounded: `low` must be a Python float.*got float64\[2\]"):
        hg.bounded(jnp.full(2, 0.5), np.zeros(2), np.ones(2))
    with pytest.raises(TypeError, match=r"hg\.bounded: `high` must be a Python float.* not traced"):
        jax.jit(lambda high: hg.natural(hg.bounded(0.5, 0.0, high)))(1.0)
    assert type(hg.bounded(0.5, np.float32(0), np.float32(1)).high) is float


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: 2 * x, lambda x: x - 1, lambda x: 2.0**x, lambda x: np.float32(2) * x, lambda x: jnp.ones(2) * x,
        float, abs, lambda x: x[0], lambda x: x > 0, lambda x: 0 <= x,
    ],
    ids=["times", "minus", "power", "numpy", "jax", "float", "abs", "item", "greater", "at most"],
)  # fmt: skip
def test_what_is_no_number_yet_has_no_arithmetic_and_says_where_the_number_is(operation) -> None:
    for given, cure in (
        (hg.positive(0.5), "hg.natural(hypers)"),
        (hg.PerStep(jnp.ones(3)), ".values"),
        (hg.knots(jnp.ones(2), 3), "hg.natural"),
    ):
        with pytest.raises(TypeError, match="has no arithmetic .*" + re.escape(cure)):
            operation(given)


def test_domains_are_compared_and_are_trees_all_the_same() -> None:
    a = hg.positive(0.5)
    assert a == hg.positive(0.5) and a != hg.positive(0.25)
    assert jax.tree.map(lambda u: 2 * u, a).natural() == pytest.approx(0.25)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("u", [-6.0, -0.5, 4.5, 6.0])
def test_the_slope_near_the_upper_end_has_its_digits(dtype, u):
    """s (1 - s) has none left where s rounds to 1."""
    h = hg.bounded(jnp.asarray(0.5, dtype), 0.0, 1.0)
    natural = lambda u: hg.natural(eqx.tree_at(lambda h: h.unconstrained, h, u)).astype(jnp.float32)  # noqa: E731
    slope = float(jax.grad(natural)(jnp.asarray(u, dtype)))
    expected = 1 / (1 + math.exp(u)) / (1 + math.exp(-u))
    assert abs(slope / expected - 1) < 4 * float(jnp.finfo(dtype).eps)
