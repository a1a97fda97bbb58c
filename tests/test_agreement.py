"""`check_gradient` and `check_smoothness` tell the truth about gradients that are right, wrong, or of no use."""

import collections
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import fails

import hypergrad as hg


STEPS = 8
DATA = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
TARGET = DATA @ np.float32([1, -2, 0.5])


def loss(w: Any, theta: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2) + theta * jnp.sum(w**2)


def train_fn(h: Any, key: Any) -> jax.Array:
    sgd = hg.SGD(hg.PerStep(h["learning_rate"].values), h["momentum"])
    start = 0.3 * jax.random.normal(key, 3)
    return hg.train(loss, start, sgd, hg.full_batch((DATA, TARGET)), theta=h["penalty"], steps=STEPS).params


def val_fn(w: Any) -> jax.Array:
    return jnp.mean((DATA @ w - TARGET) ** 2)


HYPERS = {
    "learning_rate": hg.positive(hg.PerStep(jnp.full(STEPS, 0.2))),
    "momentum": 0.5,
    "penalty": hg.fixed(1e-2),
}


@pytest.fixture(scope="module")
def gradient() -> Any:
    return hg.hypergradient(train_fn, val_fn, HYPERS)[1]


def test_a_right_gradient_agrees(gradient: Any) -> None:
    check = hg.check_gradient(train_fn, val_fn, HYPERS)
    assert check.verdict == "agrees" and check.relative_error < 1e-3 and check.noise < 1e-3 * abs(check.difference)
    sum_ = jnp.sum(jnp.abs(gradient["learning_rate"].unconstrained.values)) + 0.5 * jnp.abs(gradient["momentum"])
    np.testing.assert_allclose(check.derivative, sum_, rtol=1e-5)
    assert "within 0.005" in str(check)


def test_lies_of_one_percent_disagree(gradient: Any) -> None:
    """In all of it, or in its largest coordinate alone by ten; a zero where something depends on a hyperparameter."""
    off = jax.tree.map(lambda g: 1.01 * g, gradient)
    assert_disagrees(hg.check_gradient(train_fn, val_fn, HYPERS, gradient=off))
    for factor in (0.9, 0.0):
        assert_disagrees(
            hg.check_gradient(train_fn, val_fn, HYPERS, gradient=gradient | {"momentum": factor * gradient["momentum"]})
        )
    turned = collections.OrderedDict(reversed(list(gradient.items())))
    right = hg.check_gradient(train_fn, val_fn, HYPERS, gradient=turned)
    assert right.verdict == "agrees"


def assert_disagrees(check: hg.GradientCheck) -> None:
    assert check.verdict == "disagrees" and "not the derivative" in check.explain()


@jax.custom_jvp
def lie(x: Any) -> Any:
    return x


lie.defjvp(lambda primals, tangents: (primals[0], 1.01 * tangents[0]))


def test_a_wrong_derivative_rule_is_found() -> None:
    assert_disagrees(hg.check_gradient(lambda h, key: h**2, lie, hg.positive(jnp.array(2.0))))


def test_a_function_too_rough_for_differences_is_too_noisy_to_tell() -> None:
    def rough(h: Any, key: Any) -> Any:
        return h + jnp.sin(3e5 * h)  # its derivative exists, and no float32 difference sees it

    check = hg.check_gradient(rough, jnp.asarray, hg.positive(2.0))
    assert check.verdict == "the difference is too noisy to tell" and "do not settle" in check.explain()


def test_smoothness_of_known_functions() -> None:
    """f = -a u + b u^2 / 2 at u = 0: the ratio of actual and predicted change is 1 - b s / 2a, the slope turns at a / b."""
    for b, ratio, cosine, trusted in [(0.0, 1.0, 1, 0.2), (6.0, 0.85, 1, 0.025), (64.0, -0.6, -1, 0.003125)]:
        s = hg.check_smoothness(lambda h, key, b=b: -h + b * h**2 / 2, jnp.asarray, 0.0, step=0.05)
        np.testing.assert_allclose([s.ratio, s.trusted_step], [ratio, trusted], rtol=1e-3)
        assert round(s.cosine) == cosine and s.same_sign == (cosine > 0)
        assert str(s).startswith("smooth" if cosine > 0 else "rough")
        np.testing.assert_allclose(s.actual, -s.sizes + b * s.sizes**2 / 2, rtol=1e-4)
    assert s.trusted_step < s.step / 8 and "lower its learning rate" in s.explain()
    steeper = hg.check_smoothness(lambda h, key: -h - 60 * h**2 / 2, jnp.asarray, 0.0, step=0.05)
    assert round(steeper.ratio, 2) == 2.5 and str(steeper).startswith("rough")  # further than predicted is no safer


@pytest.mark.long
def test_smoothness_of_training_moves_what_is_learned_by_at_most_the_step(gradient: Any) -> None:
    seen = []

    def watched(h: Any, key: Any) -> Any:
        seen.append(h)
        return train_fn(h, key)

    s = hg.check_smoothness(watched, val_fn, HYPERS, step=0.04)
    assert s.ratio == pytest.approx(1, abs=0.2) and s.cosine > 0.9 and s.trusted_step >= 0.01
    moves = [jnp.log(h["learning_rate"].values / 0.2) for h in seen[1:9]]
    relative = [
        max(float(jnp.max(jnp.abs(m))), abs(float(h["momentum"]) - 0.5) / 0.5) for m, h in zip(moves, seen[1:9], strict=True)
    ]
    np.testing.assert_allclose(relative, s.sizes, rtol=1e-3)
    assert all(float(h["penalty"]) == np.float32(1e-2) for h in seen)


def test_where_training_fails_there_is_no_prediction() -> None:
    def val_fn(trained: Any) -> jax.Array:
        w, momentum = trained
        return 1e-3 * jnp.sum(w) - momentum  # downhill, the momentum passes 1

    s = hg.check_smoothness(lambda h, key: (train_fn(h, key), h["momentum"]), val_fn, HYPERS, step=1.0)
    assert np.isfinite(s.actual[0]) and np.isnan(s.actual[-1]) and np.isnan(s.ratio) and np.isnan(s.cosine)
    assert s.trusted_step > 0 and "with which training fails" in s.explain()


def test_a_hypergradient_of_zero_has_no_direction() -> None:
    with pytest.warns(UserWarning, match="exactly zero"), fails(ValueError, "no direction to follow", "is zero"):
        hg.check_smoothness(lambda h, key: h["x"], lambda x: 0 * x + 1, {"x": 2.0})
    with pytest.warns(UserWarning, match="exactly zero"), fails(ValueError, "no direction to follow", "is zero"):
        hg.check_smoothness(lambda h, key: 1.0, lambda x: x, {"none": jnp.zeros(0)})


def test_a_gradient_that_is_not_finite_disagrees(gradient: Any) -> None:
    """Its infinity is not within a share of itself."""
    for value in (math.inf, math.nan):
        check = hg.check_gradient(train_fn, val_fn, HYPERS, gradient=gradient | {"momentum": value})
        assert check.verdict == "disagrees" and not check.relative_error <= 1


@pytest.mark.parametrize("check", [hg.check_gradient, hg.check_smoothness])
@pytest.mark.parametrize("step", [0.0, -0.125, math.nan, math.inf])
def test_a_difference_needs_a_step(check: Any, step: float) -> None:
    with fails(ValueError, "`step` must be a finite number above 0"):
        check(train_fn, val_fn, HYPERS, step=step)


def test_a_given_gradient_is_like_the_hyperparameters() -> None:
    square = lambda h, key: h["x"] ** 2  # noqa: E731
    assert hg.check_gradient(square, lambda x: x, {"x": 2.0}, gradient={"x": 4.0}).verdict == "agrees"
    assert hg.check_gradient(square, lambda x: x, {"x": 2.0}, gradient={"x": 0.0}).verdict == "disagrees"
    for wrong in ({"y": 4.0}, {"x": np.ones(2)}, {}):
        with fails(ValueError, "`gradient` must be a pytree like the hyperparameters"):
            hg.check_gradient(square, lambda x: x, {"x": 2.0}, gradient=wrong)


def test_slopes_that_are_exchanged_disagree() -> None:
    """Their sum, along the sign of the gradient, is right."""
    twice = lambda h, key: 3 * h["x"][0] + 2 * h["x"][1] ** 2  # noqa: E731
    hypers = {"x": jnp.array([1.0, 1.5])}
    assert hg.check_gradient(twice, lambda x: x, hypers, gradient={"x": jnp.array([3.0, 6.0])}).verdict == "agrees"
    assert_disagrees(hg.check_gradient(twice, lambda x: x, hypers, gradient={"x": jnp.array([6.0, 3.0])}))


@pytest.mark.parametrize("fixed", [2.0, 2, "two"])
def test_what_is_fixed_does_not_move(fixed: Any) -> None:
    """Its derivative is zero, and its differences are not; whole numbers and strings have none."""
    hypers = {"x": hg.positive(1.5), "y": hg.fixed(fixed)}
    f = lambda h: hg.natural(h)["x"] ** (2 if fixed == "two" else hg.natural(h)["y"])  # noqa: E731
    for gradient in (None, {"x": hg.positive(jnp.exp(4.5)), "y": hg.fixed(0.0)}):
        hg.testing.check_hypergradient(f, hypers, tolerance=1e-3, gradient=gradient)
    with pytest.raises(AssertionError, match="the gradient is not the derivative"):
        hg.testing.check_hypergradient(f, hypers, tolerance=1e-3, gradient=hypers)
    with fails(ValueError, "every leaf of it is hg.fixed"):
        hg.testing.check_hypergradient(f, {"y": hg.fixed(fixed)}, tolerance=1e-3)


def test_a_difference_that_is_no_number_agrees_with_nothing() -> None:
    """In one of the directions alone, after one in which it is a number."""
    f = lambda h: jnp.where(h[0] - h[1] > 5e-4, jnp.nan, h[0] * 2 + h[1] * 3)  # noqa: E731
    with pytest.raises(AssertionError, match="the gradient is not the derivative"):
        hg.testing.check_hypergradient(f, jnp.zeros(2), tolerance=1e-3)
    with fails(ValueError, "`directions` must be at least 1"):
        hg.testing.check_hypergradient(f, jnp.zeros(2), tolerance=1e-3, directions=0)
    with fails(ValueError, "`step` must be a finite number above 0"):
        hg.testing.check_hypergradient(f, jnp.zeros(2), tolerance=1e-3, step=0.0)


ROUNDED = {  # what is lost to rounding: the value's, its dtype's, the hyperparameter's
    "a slope below float32": (lambda x: 1 + 1e-6 * x, jnp.float32(1)),
    "a value in float16": (lambda x: (10 + x**2).astype(jnp.float16), jnp.float32(0.1)),
    "a value in bfloat16": (lambda x: (10 + x**2).astype(jnp.bfloat16), jnp.float32(0.1)),
}


@pytest.mark.parametrize("what", ROUNDED)
@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_differences_that_rounding_takes_say_nothing(what: str, factor: float) -> None:
    """Neither of a right gradient nor of none: such differences are zero at all small sizes, and seem to have settled."""
    f, x = ROUNDED[what]
    gradient = factor * jax.grad(lambda x: f(x).astype(jnp.float32))(x)
    check = hg.check_gradient(lambda h, key: h, f, x, gradient=gradient)
    assert check.verdict == "the difference is too noisy to tell", check
    assert ("rounding of their value" if np.isinf(check.noise) else "do not settle") in check.explain()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_hyperparameter_of_16_bits_is_not_told_off(dtype: Any) -> None:
    h = {"x": jnp.asarray(0.01, dtype), "y": hg.positive(jnp.asarray(0.01, dtype))}
    val_fn = lambda h: 3 * h["x"].astype(jnp.float32) + jnp.log(h["y"].astype(jnp.float32))  # noqa: E731
    for gradient in (None, jax.tree.map(jnp.zeros_like, h)):
        check = hg.check_gradient(lambda h, key: h, val_fn, h, gradient=gradient)
        assert check.verdict != ("disagrees" if gradient is None else "agrees"), check


def test_rungs_that_rounding_takes_are_no_limit() -> None:
    s = hg.check_smoothness(lambda h, key: h, lambda h: 100 + 1e-3 * h, jnp.float32(1.0))
    assert s.trusted_step > 0


def test_what_moves_less_than_rounding_is_flat_and_not_rough() -> None:
    s = hg.check_smoothness(lambda h, key: h, lambda h: 100 + 1e-6 * h, jnp.float32(1.0))
    assert str(s).startswith("flat: ") and "The hyperparameters hardly matter here" in s.explain()
    check = hg.check_gradient(lambda h, key: h, lambda h: 100 + 1e-8 * h, jnp.float32(1.0))
    assert (
        "too noisy" in check.verdict and "start where the hyperparameters matter" in str(check) and "inf" not in str(check)
    )
