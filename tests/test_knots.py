"""Schedules held as a few values: what they spread to, where their knots may stand, and that they train as they should."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.interpolate import CubicSpline
from test_optimize import STEPS, trainer, val_fn

import hypergrad as hg


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", lambda v, t: np.interp(t, np.linspace(0, 9, 4), v)),
        ("cubic", lambda v, t: CubicSpline(np.linspace(0, 9, 4), v, bc_type="natural")(t)),
        ("constant", lambda v, t: v[np.array([0, 0, 0, 1, 1, 2, 2, 2, 3, 3])]),
    ],
)
def test_knots_spread_over_the_steps(kind: str, expected: Any) -> None:
    values = np.float32([1.0, 3.0, 2.0, 5.0])
    steps = hg.natural(hg.knots(jnp.asarray(values), 10, kind)).values
    np.testing.assert_allclose(steps, expected(values, np.arange(10)), rtol=1e-5)
    in_a_domain = hg.natural(hg.positive(hg.knots(jnp.asarray(values), 10, kind)))
    assert isinstance(in_a_domain, hg.PerStep)
    np.testing.assert_allclose(np.log(in_a_domain.values), expected(np.log(values), np.arange(10)), rtol=1e-4, atol=1e-5)
    same = hg.natural(hg.positive(hg.knots(jnp.full((3, 2), 0.7), 10, kind))).values
    np.testing.assert_allclose(same, np.full((10, 2), 0.7), rtol=1e-5)


AT = [2, 3.5, 8]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", lambda v, t: np.interp(t, AT, v)),
        ("cubic", lambda v, t: CubicSpline(AT, v, bc_type="natural")(np.clip(t, 2, 8))),
        ("constant", lambda v, t: v[np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])]),
    ],
)
def test_knots_stand_where_they_are_put(kind: str, expected: Any) -> None:
    values = np.float32([1.0, 3.0, 2.0])
    steps = hg.natural(hg.knots(jnp.asarray(values), 10, kind, AT)).values
    np.testing.assert_allclose(steps, expected(values, np.arange(10)), rtol=1e-5)
    evenly = hg.natural(hg.knots(jnp.asarray(values), 10, kind, np.array([0, 4.5, 9]))).values
    if kind != "constant":
        np.testing.assert_allclose(evenly, hg.natural(hg.knots(jnp.asarray(values), 10, kind)).values, rtol=1e-6)


@pytest.mark.parametrize(("kind", "ends"), [("linear", [1e-2, 1e-4]), ("cubic", [0.1, 0.1, 0.01, 0.01])])
def test_knots_far_apart_spread_in_logarithms(kind: str, ends: list[float]) -> None:
    """Between the knots of a domain nothing is what it is in natural units, which may even be negative."""
    found = hg.natural(hg.positive(hg.knots(np.float32(ends), 10, kind))).values
    expected = np.exp(hg.knots(np.log(ends), 10, kind).per_step().values)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(found)[[0, -1]], [ends[0], ends[-1]], rtol=1e-5)


def test_knots_train_like_the_schedule_they_stand_for() -> None:
    knots = hg.positive(hg.knots(jnp.array([0.02, 0.1, 0.05]), STEPS))
    schedule = hg.natural(knots)
    value, grads = hg.hypergradient(trainer(), val_fn, {"learning_rate": knots})
    _, each = hg.hypergradient(trainer(), val_fn, {"learning_rate": hg.positive(schedule)})
    weights = np.stack([np.interp(np.arange(STEPS), np.linspace(0, STEPS - 1, 3), unit) for unit in np.eye(3)])
    expected = weights @ np.asarray(each["learning_rate"].unconstrained.values)  # the chain rule, in logarithms
    np.testing.assert_allclose(grads["learning_rate"].unconstrained.values, expected, rtol=1e-4)
    key = jax.random.key(0)
    direct = trainer()({"learning_rate": hg.knots(jnp.array([0.02, 0.1, 0.05]), STEPS)}, key)  # without `natural`
    assert jnp.all(jnp.isfinite(direct))
    assert value.shape == ()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1.0, 5), r"hg.knots has shape \(\); its leading axis counts the knots, from 1 to steps=5"),
        ((jnp.ones(6), 5), r"hg.knots has shape \(6,\)"),
        (({"a": jnp.ones(0)}, 5), r"hg.knots\['a'\] has shape \(0,\)"),
        ((jnp.ones(2), 5, "quadratic"), "`kind` of hg.knots must be one of 'linear', 'cubic', 'constant'; got 'quadratic'"),
        ((jnp.ones(2), 0), "`steps` of hg.knots must be an integer of at least 1; got 0"),
        ((jnp.ones(2), 5, "linear", [0, 2, 4]), r"hg.knots has shape \(2,\), for 3 positions: give one position for each"),
        ((jnp.ones(2), 5, "linear", [3, 3]), r"`positions` of hg.knots must be increasing numbers between 0 and"),
        ((jnp.ones(2), 5, "cubic", [0, 5]), r"between 0 and steps - 1 = 4, one for each knot; got \[0, 5\]"),
        ((jnp.ones(3), 5, "linear", [0, 0.5, 1]), r"all within one step. They are steps, not parts of the run"),
        ((jnp.ones(2), 5, "cubic", [0, float("nan")]), "`positions` of hg.knots must be increasing numbers"),
    ],
)
def test_knots_that_make_no_schedule(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hg.knots(*arguments)


def test_positions_of_knots_are_not_learned() -> None:
    with pytest.raises(TypeError, match="`positions` of hg.knots .* they are traced. They are not learned"):
        jax.jit(lambda at: hg.natural(hg.knots(jnp.ones(2), 5, positions=at)).values)(jnp.array([0.0, 4.0]))
    with pytest.raises(TypeError, match="`positions` of hg.knots must be increasing numbers"):
        hg.knots(jnp.ones(2), 5, positions=3)


def test_integers_are_spread_as_floats() -> None:
    np.testing.assert_allclose(hg.natural(hg.fixed(hg.knots(jnp.array([0, 4]), 5))).values, [0, 1, 2, 3, 4], atol=1e-6)


@pytest.mark.parametrize(
    "values", [jnp.array([True, False]), jnp.ones(2, complex), {"a": hg.PerStep(jnp.ones(2, bool))}, "ab"]
)
def test_knots_are_real_numbers(values: Any) -> None:
    with pytest.raises(TypeError, match="must be real numbers; got"):
        hg.knots(values, 4)


def test_what_comes_third_is_the_kind() -> None:
    with pytest.raises(ValueError, match=r"`kind` of hg.knots must be one of 'linear'.*got \[0, 3\]"):
        hg.knots(jnp.ones(2), 4, [0, 3])


def test_a_list_of_knots_is_told_from_an_array() -> None:
    with pytest.raises(
        ValueError, match=r"hg.knots\[0\] has shape \(\);.*A list is a tree of its entries: make it an array"
    ):
        hg.knots([0.1, 0.2], 3)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_hypergradients_of_knots_in_16_bits_are_rounded_at_the_end_alone(dtype: Any) -> None:
    """Each step's is 1.4e-8, which float16 has not."""
    steps, batches = 2000, hg.full_batch(jnp.zeros(1))

    def end(values: Any) -> jax.Array:
        loss = lambda w, theta, _: 7e-5 * theta["shift"] * jnp.sum(w)  # noqa: E731
        run = hg.train(loss, jnp.ones(2), hg.SGD(1e-4), batches, theta={"shift": hg.knots(values, steps)}, steps=steps)
        return jnp.sum(run.params)

    coarse, fine = (jax.grad(end)(jnp.full(3, 0.5, x)) for x in (dtype, np.float32))
    assert coarse.dtype == dtype
    np.testing.assert_allclose(coarse.astype(np.float32), fine, rtol=0.01)
