"""What is measured at each step: as a plain loop measures it, and differentiable like the losses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import some_of
from problems import network
from tiny import fails, train

import hypergrad as hg
from hypergrad._plan import _Cut


NET = network("tanh")
STEPS = 6
ADJOINTS = {
    "reversible": hg.Reversible(),
    "host": hg.Reversible(driver="host"),
    "off the device": hg.Reversible(buffer="host"),
    "in segments": _Cut(first=4, segments=(2,)),
    "checkpointed": hg.Checkpointed(),
}
RULES: dict[str, Any] = {
    "sgd": lambda r: hg.SGD(hg.PerStep(r), 0.5),
    "adam": lambda r: hg.Adam(hg.PerStep(r), 0.5, 0.75, 2.0**-7),
    "clipped": lambda r: hg.clip_by_global_norm(hg.HeavyBall(hg.PerStep(r), 0.5), 0.25),
    "a rate per leaf": lambda r: hg.SGD(hg.PerStep({"w1": r, "w2": 2 * r}), 0.5),
}


def metric(params: Any, theta: Any, batch: Any, state: Any, hypers: Any) -> dict[str, jax.Array]:
    g = jax.grad(NET.loss)(params, theta, batch)
    rates = jax.tree.leaves(hypers, is_leaf=lambda x: isinstance(x, jax.Array))
    return {
        "gradient norm": optax.tree.norm(g),
        "state": sum(jnp.sum(jnp.sin(z)) for z in jax.tree.leaves(state)),
        "rates": sum(jnp.sum(x) for x in rates) * params["w1"][0, 0] * theta["w1"][1, 1],
    }


def rates(dtype: Any = jnp.float64) -> jax.Array:
    return jnp.linspace(0.25, 0.5, STEPS).astype(dtype)


def objective(kind: str, adjoint: Any, arguments: Any, dtype: Any = jnp.float64) -> jax.Array:
    """Of all that is measured, with other weights at each step, and of the end."""
    rate, theta, params = arguments
    options = {"theta": theta, "metric": metric, "adjoint": adjoint}
    run = hg.train(NET.loss, params, RULES[kind](rate), NET.batches(STEPS), **options)
    weights = jnp.cos(jnp.arange(STEPS, dtype=dtype))
    return sum(weights @ x**2 for x in jax.tree.leaves(run.metrics)) + NET.value(run.params) + run.losses[2]


def arguments(dtype: Any = jnp.float64) -> Any:
    return rates(dtype), NET.theta(dtype), NET.params(dtype)


def assert_close(found: Any, expected: Any, rtol: float) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * float(jnp.abs(y).max()))


def plain(arguments: Any) -> jax.Array:
    """`objective` of SGD, a scan of floats."""
    rate, theta, params = arguments
    batches = NET.batches(STEPS)

    def step(carry: Any, x: Any) -> Any:
        (w, v), (t, a) = carry, x
        found = metric(w, theta, batches(t), {"velocity": v}, hg.SGD(a, 0.5))
        g = jax.grad(NET.loss)(w, theta, batches(t))
        v = jax.tree.map(lambda v, g: 0.5 * v - 0.5 * g, v, g)
        return (jax.tree.map(lambda w, v: w + a * v, w, v), v), (found, NET.loss(w, theta, batches(t)))

    start = params, jax.tree.map(jnp.zeros_like, params)
    (end, _), (found, losses) = jax.lax.scan(step, start, (jnp.arange(STEPS, dtype=jnp.int32), rate))
    weights = jnp.cos(jnp.arange(STEPS, dtype=rate.dtype))
    return sum(weights @ x**2 for x in jax.tree.leaves(found)) + NET.value(end) + losses[2]


@some_of("name", ADJOINTS, "reversible")
def test_it_is_that_of_a_plain_loop_with_every_derivative(name: str) -> None:
    with jax.enable_x64(True):
        found = jax.value_and_grad(functools.partial(objective, "sgd", ADJOINTS[name]))(arguments())
        assert_close(found, jax.jit(jax.value_and_grad(plain))(arguments()), 1e-9)


@pytest.mark.long
@some_of("kind", list(RULES)[1:], "clipped")
def test_by_every_rule_as_unrolled(kind: str) -> None:
    with jax.enable_x64(True):
        found, expected = (
            jax.value_and_grad(functools.partial(objective, kind, a))(arguments()) for a in (hg.Reversible(), hg.Unrolled())
        )
        assert_close(found, expected, 1e-11)


@pytest.mark.long
def test_inside_of_jit_and_vmap() -> None:
    f = jax.value_and_grad(functools.partial(objective, "adam", hg.Reversible(), dtype=jnp.float32))
    many = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), arguments(jnp.float32))
    each = [jax.jit(f)(jax.tree.map(lambda x, i=i: x[i], many)) for i in range(2)]
    assert_close(jax.jit(jax.vmap(f))(many), jax.tree.map(lambda *x: jnp.stack(x), *each), 1e-4)


@pytest.mark.long
def test_training_is_the_same_with_it_and_without() -> None:
    options = {"theta": NET.theta(), "steps": STEPS}
    measured, alone = (
        hg.train(NET.loss, NET.params(), hg.Adam(0.01), NET.batches(STEPS), metric=m, **options) for m in (metric, None)
    )
    assert alone.metrics is None
    for x, y in zip(
        jax.tree.leaves((measured.params, measured.losses)), jax.tree.leaves((alone.params, alone.losses)), strict=True
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.long
def test_with_rows_of_theta_statistics_and_values_of_its_own_per_step() -> None:
    """theta is whole where a metric sees it; batch statistics are beside it."""

    def loss(w: Any, theta: Any, batch: Any) -> Any:
        x, i = batch
        return theta["scale"] * jnp.sum((jnp.tanh(x * w) - theta["rows"][i]) ** 2), jnp.mean(x)

    def one(w: Any, theta: Any, batch: Any, state: Any, hypers: Any) -> Any:
        return theta["scale"] * jnp.sum(theta["rows"] ** 2 * w) + jnp.sum(state["velocity"] * hypers.learning_rate)

    def value(theta: Any, adjoint: Any) -> Any:
        data = hg.stacked((jnp.arange(12.0).reshape(4, 3) / 10, jnp.array([1, 0, 3, 1])))
        theta = {"scale": hg.PerStep(theta["scale"]), "rows": theta["rows"]}
        options = {"theta": theta, "statistics": jnp.float64(0), "metric": one, "adjoint": adjoint}
        run = hg.train(loss, jnp.ones(3), hg.SGD(jnp.float64(0.1), 0.5), data, **options)
        return jnp.sum(run.metrics**2) + run.statistics

    with jax.enable_x64(True):
        theta = {"scale": jnp.linspace(1, 2, 4), "rows": jnp.arange(12.0).reshape(4, 3)}
        found, expected = (jax.value_and_grad(value)(theta, a) for a in (hg.Reversible(), hg.Unrolled()))
        assert_close(found, expected, 1e-11)


def test_what_it_reads_from_outside_is_read_anew() -> None:
    scale = [1.0]
    of = lambda w, theta, batch, state, hypers: scale[0] * jnp.sum(w["w"])  # noqa: E731
    first = train(metric=of).metrics
    scale[0] = 2.0
    np.testing.assert_array_equal(train(metric=of).metrics, 2 * first)


def test_a_traced_value_from_outside_is_an_error() -> None:
    def f(x: Any) -> Any:
        of = lambda w, theta, batch, state, hypers: x * jnp.sum(w["w"])  # noqa: E731
        return jnp.sum(train(metric=of).metrics)

    with fails(ValueError, "`metric`", "reads the traced value `x` from outside", "a part of theta"):
        jax.grad(f)(1.0)


@some_of("adjoint", [hg.Reversible(), hg.Unrolled()], hg.Reversible(), ids=["reversible", "unrolled"])
def test_what_the_loss_and_it_read_from_outside_is_differentiated_through_both(adjoint: Any) -> None:
    def f(scale: Any) -> Any:
        loss = lambda w, _, batch: scale * jnp.sum((w["w"] - batch) ** 2)  # noqa: E731
        of = lambda w, theta, batch, state, hypers: scale * jnp.sum(w["w"] ** 3)  # noqa: E731
        params, data = {"w": jnp.array([1.0, -2.0])}, hg.full_batch(jnp.array([0.5, 0.25]))
        return jnp.sum(hg.train(loss, params, hg.SGD(0.125, 0.5), data, steps=5, metric=of, adjoint=adjoint).metrics)

    with jax.enable_x64(True):
        hg.testing.check_hypergradient(f, jnp.float64(1.25), tolerance=1e-8)


def test_a_run_that_fails_has_none() -> None:
    of = lambda w, theta, batch, state, hypers: jnp.sum(w["w"])  # noqa: E731
    assert np.isnan(train(optimizer=hg.SGD(1e9), steps=40, metric=of, throw=False).metrics).all()


@pytest.mark.parametrize(
    ("of", "fragments"),
    [
        (lambda w: w, ["`metric` must take five arguments, metric(params, theta, batch, state, hypers)"]),
        (lambda w, theta, batch, state, h: w, ["`metric` must return float scalars", "float32[2] in result['w']"]),
        (lambda w, theta, batch, state, h: (1.0, 2), ["`metric` must return float scalars", "result[1]"]),
        (lambda w, theta, batch, state, h: None, ["`metric` must return a float scalar", "got None"]),
    ],
)
def test_what_is_no_metric(of: Any, fragments: list[str]) -> None:
    with fails(TypeError, *fragments):
        train(metric=of)


def test_an_error_in_it_says_what_it_was_given() -> None:
    with fails(KeyError, "mean", "`metric(params, theta, batch, state, hypers)` was called by hypergrad", "velocity"):
        train(metric=lambda w, theta, batch, state, h: jnp.sum(state["mean"]["w"]))


@pytest.mark.long
def test_truncated_has_those_of_the_last_steps() -> None:
    """Of the state that the last steps begin with nothing is known, as of the losses."""
    of = lambda w, theta, batch, state, hypers: jnp.sum(w["w"] ** 2)  # noqa: E731

    def value(rate: Any, adjoint: Any, weights: Any) -> Any:
        run = train(optimizer=hg.SGD(rate, 0.5), steps=5, metric=of, adjoint=adjoint)
        return jnp.sum(run.metrics * weights)

    late = jnp.array([0.0, 0, 0, 1, 1])
    found = jax.grad(value)(0.1, hg.Truncated(5), late)
    np.testing.assert_allclose(found, jax.grad(value)(0.1, hg.Unrolled(), late), rtol=1e-6)
    assert jax.grad(value)(0.1, hg.Truncated(2), late) != found


def test_a_metric_at_rest_passes_on_what_comes_in_large() -> None:
    """Cotangents that come in at each step, and none at the end."""

    def f(theta: Any, unit: float, adjoint: Any) -> Any:
        own = lambda w, theta, _: 0.5 * (w - theta) ** 2  # noqa: E731
        rule = hg.clip(hg.SGD(0.5, 0.5), 10.0)
        run = hg.train(
            own, jnp.float32(1.0), rule, hg.full_batch(0.0), theta=theta, steps=10, metric=lambda w, *_: w, adjoint=adjoint
        )
        return unit * jnp.sum(run.metrics)

    expected = jax.grad(f)(1.0, 1.0, hg.Unrolled())
    np.testing.assert_allclose(jax.grad(f)(1.0, 1e16, hg.Reversible()) / 1e16, expected, rtol=1e-5)


def test_it_sees_integers_of_a_schedule_as_the_rule_does() -> None:
    given = hg.HeavyBall(hg.PerStep(jnp.array([1, 1, 2])), 0.5)
    run = train(optimizer=given, metric=lambda w, theta, batch, state, hypers: hypers.learning_rate)
    np.testing.assert_array_equal(run.metrics, [1.0, 1.0, 2.0])
    np.testing.assert_array_equal(run.losses, train(optimizer=given).losses)
