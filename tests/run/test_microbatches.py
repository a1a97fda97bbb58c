"""Microbatches: their mean is the batch's, its derivative that of every other road, and what cannot be cut is told."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from tiny import fails

import hypergrad as hg


ROWS, STEPS = 16, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, ROWS, 3))
START = {"a": RNG.normal(size=(3, 4)), "b": RNG.normal(size=4)}
RULES: dict[str, Any] = {
    "SGD": hg.SGD,
    "heavy ball": lambda rate: hg.HeavyBall(rate, 0.9),
    "Adam": lambda rate: hg.Adam(rate, eps=1e-3),
    "clip": lambda rate: hg.clip_by_global_norm(hg.SGD(rate), 0.3),
}


def output(w: Any, x: Any) -> jax.Array:
    return jnp.tanh(x @ w["a"]) @ w["b"]


def loss(w: Any, theta: Any, x: Any) -> jax.Array:
    return jnp.mean((output(w, x) - jnp.sin(x[:, 0])) ** 2) + theta * jnp.sum(w["a"] ** 2)


@jax.custom_vjp
def damped(x: Any) -> Any:
    return x


damped.defvjp(lambda x: (x, x), lambda x, g: (g * jnp.cos(x),))


def with_a_rule(w: Any, theta: Any, x: Any) -> jax.Array:
    return jnp.mean((damped(output(w, x)) - jnp.sin(x[:, 0])) ** 2) + theta * jnp.sum(w["a"] ** 2)


def with_statistics(w: Any, theta: Any, x: Any) -> Any:
    return loss(w, theta, x), jnp.mean(output(w, x)) + theta


def value(h: Any, rule: Any, loss: Any, microbatches: Any, adjoint: Any, **options: Any) -> jax.Array:
    batches = hg.stacked(jnp.asarray(X, h["theta"].dtype))
    done = hg.train(
        loss, h["w"], rule(h["rate"]), batches, theta=h["theta"], microbatches=microbatches, adjoint=adjoint, **options
    )
    more = 0.0 if done.statistics is None else done.statistics
    return jnp.sum(output(done.params, batches(0)) ** 2) + jnp.sum(done.losses**2) + more


def hypers(dtype: Any = jnp.float64) -> Any:
    return {"w": jax.tree.map(lambda x: jnp.asarray(x, dtype), START), "rate": dtype(0.1), "theta": dtype(0.05)}


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), found, expected)


@pytest.mark.parametrize(
    ("rule", "loss"),
    [
        ("SGD", with_statistics),
        long("heavy ball", with_a_rule),
        long("Adam", with_statistics),
        long("clip", with_a_rule),
        long("Adam", loss),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_every_road_has_one_derivative(rule: str, loss: Any) -> None:
    options = {"statistics": hg.Statistics(jnp.zeros(()), 0.75)} if loss is with_statistics else {}
    with jax.enable_x64(True):
        options = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), options)
        f = lambda h, m, a: value(h, RULES[rule], loss, m, a, **options)  # noqa: E731
        ours, whole = (
            jax.jit(jax.value_and_grad(lambda h, m=m, a=a: f(h, m, a)))(hypers())
            for m, a in ((4, hg.Reversible()), (None, hg.Unrolled()))
        )
        assert_close(ours, whole, 1e-9)  # the mean over all rows is that of the means


@jax.custom_vjp
def normalized(x: Any) -> Any:
    return x


normalized.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.sqrt(jnp.mean(g * g) + 1e-2),))


@pytest.mark.long
def test_a_rule_that_is_not_linear_in_its_cotangent() -> None:
    """Theta alone goes through it: what each part is handed on is its share of the cotangent, as in any mean."""

    def bent(w: Any, theta: Any, x: Any) -> jax.Array:
        joint = jnp.mean(normalized(theta * x)) + jnp.sum(w["a"] ** 2)
        return joint + jnp.sin(2 * joint) + jnp.sum(w["b"] ** 2)

    with jax.enable_x64(True):
        ours, unrolled = (
            jax.jit(jax.grad(lambda h, a=a: value(h, RULES["SGD"], bent, 4, a)))(hypers())
            for a in (hg.Reversible(), hg.Unrolled())
        )
        assert_close(ours, unrolled, 1e-9)


@pytest.mark.long
def test_second_derivatives_and_differences() -> None:
    with jax.enable_x64(True):
        f = lambda h: value(h, RULES["SGD"], loss, 4, hg.Unrolled())  # noqa: E731
        rate = lambda r: f({**hypers(), "rate": r})  # noqa: E731
        size = 1e-5
        slopes = jax.grad(rate)(0.1 + size), jax.grad(rate)(0.1 - size)
        np.testing.assert_allclose(jax.grad(jax.grad(rate))(0.1), (slopes[0] - slopes[1]) / (2 * size), rtol=1e-5)
        ours = jax.grad(lambda r: value({**hypers(), "rate": r}, RULES["SGD"], loss, 4, hg.Reversible()))(0.1)
        np.testing.assert_allclose(ours, (rate(0.1 + size) - rate(0.1 - size)) / (2 * size), rtol=1e-6)


@functools.cache
def compiled() -> Any:
    return jax.jit(jax.value_and_grad(lambda h: value(h, RULES["SGD"], loss, 4, hg.Reversible())))(hypers(jnp.float32))


@some_of("mode", ["eager", "vmap", "host", "segments"])
def test_in_every_way_to_run(mode: str) -> None:
    h = hypers(jnp.float32)
    adjoint = {"host": hg.Reversible(driver="host"), "segments": hg.Reversible(buffer="host")}.get(mode, hg.Reversible())
    f = lambda h: value(h, RULES["SGD"], loss, 4, adjoint)  # noqa: E731
    if mode == "vmap":
        lanes = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), h)
        found = jax.tree.map(lambda x: x[0], jax.vmap(jax.value_and_grad(f))(lanes))
    else:
        found = jax.value_and_grad(f)(h)
    assert_close(found, compiled(), 1e-4)


@pytest.mark.long
def test_learned_arrays_per_step_and_metrics() -> None:
    """Theta of a step, one that rows are read from, and what is measured of the whole batch."""

    def picked(w: Any, theta: Any, batch: Any) -> jax.Array:
        rows, x = batch
        return jnp.mean((output(w, x + theta["table"][rows]) - 1) ** 2) * theta["scale"]

    def run(h: Any, microbatches: Any, adjoint: Any) -> jax.Array:
        theta = {"table": h["table"], "scale": hg.PerStep(h["scale"])}
        batches = hg.stacked((jnp.asarray(np.arange(STEPS * ROWS).reshape(STEPS, ROWS) % 20), jnp.asarray(X)))
        done = hg.train(
            picked, h["w"], hg.SGD(0.1), batches, theta=theta, microbatches=microbatches, adjoint=adjoint,
            metric=lambda w, theta, batch, state, hypers: jnp.mean(output(w, batch[1])) * theta["scale"],
        )  # fmt: skip
        return jnp.sum(done.metrics**2) + jnp.sum(done.params["b"] ** 2)

    with jax.enable_x64(True):
        h = {"w": jax.tree.map(jnp.asarray, START), "table": jnp.ones((20, 3)) / 3, "scale": jnp.linspace(1, 2, STEPS)}
        of = lambda m, a: jax.value_and_grad(run)(h, m, a)  # noqa: E731
        ours = of(8, hg.Reversible())
        assert_close(ours, of(8, hg.Unrolled()), 1e-9)
        assert_close(ours, of(None, hg.Unrolled()), 1e-9)


def test_each_part_has_a_key_of_its_own() -> None:
    def noisy(w: Any, theta: Any, batch: Any) -> jax.Array:
        x, key = batch
        return jnp.mean(w * jax.random.normal(key, x.shape)) + 0 * jnp.sum(x)

    key = jax.random.key(3)
    batches = lambda t: (jnp.zeros(ROWS), key)  # noqa: E731
    done = hg.train(noisy, jnp.float32(1), hg.SGD(0.1), batches, steps=1, microbatches=4)
    parts = [jax.random.normal(jax.random.fold_in(key, m), (4,)) for m in range(4)]
    np.testing.assert_allclose(done.losses[0], np.mean(parts), rtol=1e-6)


def test_a_number_of_python_stays_one() -> None:
    """In a loss of bfloat16 it takes that type."""
    batches = lambda t: (jnp.ones((ROWS, 3), jnp.bfloat16), 2.0)  # noqa: E731
    of = lambda w, _, batch: jnp.mean(batch[0] * w) * batch[1]  # noqa: E731
    done = [hg.train(of, jnp.ones(3, jnp.bfloat16), hg.SGD(0.1), batches, steps=2, microbatches=m).losses for m in (None, 1)]
    assert done[0].dtype == done[1].dtype == jnp.bfloat16
    np.testing.assert_array_equal(*done)


@pytest.mark.long
def test_certified_by_check_reversal() -> None:
    w, batches = hypers(jnp.float32)["w"], hg.stacked(jnp.asarray(X, jnp.float32))
    given = {"theta": jnp.float32(0.05), "microbatches": 4}
    assert hg.check_reversal(loss, w, hg.Adam(0.1), batches, **given).exact


@pytest.mark.long
def test_remembered_by_a_record(tmp_path: Any) -> None:
    w, batches = hypers(jnp.float32)["w"], hg.stacked(jnp.asarray(X, jnp.float32))
    given = {"theta": jnp.float32(0.05), "microbatches": 4}
    record = hg.record(loss, w, hg.SGD(0.1), batches, folder=tmp_path / "run", **given)
    trained = hg.train(loss, w, hg.SGD(0.1), batches, **given)
    jax.tree.map(np.testing.assert_array_equal, record.trained.params, trained.params)
    with fails(ValueError, "what `loss`, `batches` or `optimizer` compute differ"):
        hg.record(loss, w, hg.SGD(0.1), batches, folder=tmp_path / "run", theta=given["theta"], microbatches=2)
    assert hg.plan(loss, w, hg.SGD(0.1), batches, **given, measure=False).roads


def test_a_gradient_out_of_range_is_an_error_that_names_the_leaf() -> None:
    steep = lambda w, theta, x: 1e8 * jnp.mean(w["b"]) + jnp.mean(w["a"] ** 2) + 0 * jnp.sum(x)  # noqa: E731
    w, batches = hypers(jnp.float32)["w"], hg.stacked(jnp.asarray(X, jnp.float32))
    with fails(hg.RangeError, "velocity['b']"):
        hg.train(steep, w, hg.SGD(1e-9, 0.5), batches)
    with fails(hg.NonFiniteError, "velocity['b']", "step 0", "microbatches=4", "4,194,304"):
        hg.train(steep, w, hg.SGD(1e-9, 0.5), batches, microbatches=4)


def arrays(*shapes: Any) -> Any:
    return lambda t: tuple(jnp.zeros(shape) for shape in shapes)


def train(microbatches: Any, batches: Any = arrays((ROWS, 3))) -> Any:  # noqa: B008
    plain = lambda w, theta, batch: jnp.sum(w**2) + sum(jnp.sum(x) for x in batch)  # noqa: E731
    return hg.train(plain, jnp.ones(2), hg.SGD(0.1), batches, steps=2, microbatches=microbatches)


@pytest.mark.parametrize(
    ("error", "call", "texts"),
    [
        (ValueError, lambda: train(3), ("microbatches=3", "16 rows", "1, 2, 4, 8, 16")),
        (ValueError, lambda: train(0), ("from 1 to 8192", "got 0")),
        (TypeError, lambda: train(2.0), ("int", "hg.Microbatches", "float")),
        (TypeError, lambda: train(True), ("int",)),
        (ValueError, lambda: train(4, arrays((ROWS, 3), (2,))), ("batch[1]", "(2,)", "16 rows", "jax.random.key")),
        (ValueError, lambda: train(4, arrays(())), ("by rows", "has none")),
        (ValueError, lambda: train(hg.Microbatches(4, "data")), ("'data'", "no mesh", "jax.set_mesh")),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_told(error: Any, call: Any, texts: Any) -> None:
    with fails(error, *texts):
        call()


@pytest.mark.long
@some_of(
    ("unit", "of"),
    list(itertools.product([1e-300, 1e-16, 1.0, 1e16, 1e300], ["validation", "theta"])),
    (1e-300, "validation"),
)
def test_derivatives_of_any_size(unit: float, of: str) -> None:
    """What is small beside something else: one leaf's cotangent, one leaf's product."""
    in_theta = unit if of == "theta" and 1e-200 < unit < 1e10 else 1.0

    def penalized(w: Any, theta: Any, x: Any) -> jax.Array:
        return loss(w, theta[0], x) + in_theta * theta[1] * jnp.sum(w["b"] ** 2)

    def run(theta: Any, microbatches: Any, adjoint: Any) -> jax.Array:
        w = jax.tree.map(jnp.asarray, START)
        done = hg.train(penalized, w, hg.SGD(0.1), hg.stacked(jnp.asarray(X)), theta=theta, microbatches=microbatches,
                        adjoint=adjoint)  # fmt: skip
        return (unit if of == "validation" else 1.0) * jnp.sum(done.params["a"] ** 2) + done.losses[-1]

    with jax.enable_x64(True):
        theta = [jnp.float64(0.05), jnp.float64(0.01 / in_theta)]
        ours, oracle = (jax.grad(run)(theta, 4, adjoint) for adjoint in (hg.Reversible(), hg.Unrolled()))
    np.testing.assert_allclose(ours, oracle, rtol=1e-9)


def test_losses_of_a_run_that_converges() -> None:
    exact = lambda w, theta, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    with jax.enable_x64(True):
        done = hg.train(exact, jnp.ones(3), hg.SGD(0.3, 0.1), hg.full_batch(jnp.asarray(X[0])), steps=200, microbatches=4)
        assert 0 < done.losses[-1] < 1e-20


def test_float16_is_added_in_float32() -> None:
    steep = lambda w, theta, x: jnp.mean(w * x.mean()).astype(jnp.float16)  # noqa: E731
    x, w = jnp.full((ROWS, 2), 3e4, jnp.float16), jnp.ones(2, jnp.float16)
    roads = (hg.Reversible(), hg.Unrolled())
    ours, stored = (
        hg.train(steep, w, hg.SGD(1e-5), hg.full_batch(x), steps=2, microbatches=8, adjoint=a).params for a in roads
    )
    np.testing.assert_array_equal(ours, stored)
