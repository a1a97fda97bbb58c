"""What the meta-loop offers beyond descent: seeds, line searches, a third split, restarts, bounds."""

import io
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import long
from test_optimize import RATE, loss, trainer, val_fn

import hypergrad as hg


FLAT = optax.sgd(0.0)


def one_step(train_fn: Any = None, hypers: Any = RATE, **options: Any) -> hg.MetaStep:
    options = {"meta_optimizer": FLAT, "meta_steps": 1, **options}
    return hg.optimize(train_fn or trainer(), val_fn, hypers, **options).history[0]


def noisy(hypers: Any, key: Any) -> Any:
    return jnp.sum((hypers["learning_rate"] + jax.random.normal(key)) ** 2)


@pytest.mark.parametrize(("seeds", "jit"), [(5, True), (3, False)])
def test_seeds_are_averaged_with_their_standard_error(seeds: int, jit: bool) -> None:
    calls = []
    train_fn = lambda hypers, key: (calls.append(0), noisy(hypers, key))[1]  # noqa: E731
    result = hg.optimize(train_fn, lambda x: x, RATE, seeds_per_step=seeds, jit=jit, meta_optimizer=FLAT, meta_steps=2)
    assert len(calls) == (1 if jit else 2 * seeds)
    done = result.history[1]
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 1), seeds)
    shifted = 0.05 + np.array([jax.random.normal(key) for key in keys])
    values, slopes = shifted**2, 2 * shifted * 0.05  # the learning rate is stored as its logarithm
    np.testing.assert_allclose(done.value, values.mean(), rtol=1e-4)
    np.testing.assert_allclose(done.value_error, values.std(ddof=1) / math.sqrt(seeds), rtol=1e-4)
    np.testing.assert_allclose(done.gradient_norm, abs(slopes.mean()), rtol=1e-4)
    np.testing.assert_allclose(done.gradient_error, slopes.std(ddof=1) / math.sqrt(seeds), rtol=1e-4)
    np.testing.assert_allclose(done.signal_to_noise, done.gradient_norm / done.gradient_error)
    assert done.failed_seeds == 0


def test_seeds_train_like_runs_of_their_own() -> None:
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 0), 3)
    single = jax.jit(jax.value_and_grad(lambda h, key: val_fn(trainer()(hg.natural(h), key))))
    values, grads = zip(*(single(RATE, key) for key in keys), strict=True)
    done = one_step(seeds_per_step=3)
    np.testing.assert_allclose(done.value, np.mean(values), rtol=1e-5)
    slopes = [float(g["learning_rate"].unconstrained) for g in grads]
    np.testing.assert_allclose(done.gradient_norm, abs(np.mean(slopes)), rtol=1e-4)


def test_one_seed_has_no_standard_error() -> None:
    done = hg.optimize(noisy, lambda x: x, RATE, meta_steps=1).history[0]
    assert math.isnan(done.value_error)
    assert math.isnan(done.gradient_error)
    assert math.isnan(done.signal_to_noise)


def diverging(hypers: Any, key: Any) -> Any:
    """Training that fails for the seeds whose first draw is positive."""
    start = jax.random.normal(key, 3)
    rate = jnp.where(start[0] > 0, 1e12, hypers["learning_rate"])
    return hg.train(loss, start, hg.SGD(rate, 0.5), hg.full_batch((jnp.eye(3), jnp.ones(3))), theta=0.0, steps=4).params


@pytest.mark.parametrize(("seeds", "jit"), [long(6, True), (4, False)])
def test_a_seed_that_diverged_does_not_poison_the_mean(seeds: int, jit: bool) -> None:
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 0), seeds)
    good = [key for key in keys if jax.random.normal(key, 3)[0] <= 0]
    assert 0 < len(good) < seeds
    done = one_step(diverging, seeds_per_step=seeds, jit=jit, skip_nonfinite=True)
    assert done.failed_seeds == seeds - len(good)
    values = [float(val_fn(diverging(hg.natural(RATE), key))) for key in good]
    np.testing.assert_allclose(done.value, np.mean(values), rtol=1e-5)
    assert math.isfinite(done.gradient_norm)
    with pytest.raises(hg.RangeError) as caught:
        one_step(diverging, seeds_per_step=seeds, jit=jit)
    first = next(i for i, key in enumerate(keys) if jax.random.normal(key, 3)[0] > 0)
    assert f"(seed {first}, the first of {seeds - len(good)} that failed of {seeds})" in caught.value.__notes__


def test_where_every_seed_diverged_the_hypers_stay() -> None:
    always = lambda h, key: diverging({"learning_rate": h["learning_rate"] * 1e12}, key)  # noqa: E731
    options = {"seeds_per_step": 2, "skip_nonfinite": True, "meta_optimizer": optax.sgd(1.0), "meta_steps": 2}
    told = "no seed of the first two meta-steps gave a finite value and gradient.*left the range"
    with pytest.warns(UserWarning, match=told):
        result = hg.optimize(always, val_fn, RATE, **options)
    assert [done.failed_seeds for done in result.history] == [2, 2]
    assert result.hypers["learning_rate"].unconstrained == RATE["learning_rate"].unconstrained


@pytest.mark.long
def test_a_jitted_train_fn_reports_to_the_loop_that_runs_it() -> None:
    jitted = jax.jit(trainer(8))
    for _ in range(2):
        done = one_step(jitted, jit=False)
        assert done.status is not None
        assert done.bits_per_parameter_step > 0
    with pytest.raises(hg.RangeError, match="left the range"):
        one_step(jitted, {"learning_rate": 1e30}, jit=False)
    assert math.isfinite(float(jitted({"learning_rate": 0.05}, jax.random.key(0))[0]))


def quadratic(hypers: Any, key: Any) -> Any:
    """A badly scaled bowl, shifted by noise that differs from key to key."""
    return hypers["x"] * jnp.array([1.0, 10.0]) + 0.1 * jax.random.normal(key, 2)


@pytest.mark.parametrize("seeds", [long(1), 3])
def test_lbfgs_sees_one_objective_and_beats_adam(seeds: int) -> None:
    start, options = {"x": jnp.array([3.0, 1.0])}, {"meta_steps": 8, "seeds_per_step": seeds}
    steep, plain = (
        hg.optimize(quadratic, lambda w: jnp.sum(w**2), start, meta_optimizer=m, **options)
        for m in (optax.lbfgs(memory_size=5), optax.adam(0.1))
    )
    values = [done.value for done in steep.history]
    assert all(b <= a * (1 + 1e-6) for a, b in zip(values, values[1:], strict=False)), values  # one key: no noise
    if seeds == 1:
        assert values[-1] < 1e-4 * values[0]
    assert values[-1] < 0.1 * plain.history[-1].value


@pytest.mark.long
def test_a_line_search_turns_away_from_where_training_fails() -> None:
    """Beyond x = 4 the run leaves its range; the first trial steps of the search land there."""

    def f(hypers: Any, key: Any) -> Any:
        x = hypers["x"]
        w = hg.train(lambda w, theta, y: jnp.sum((w - y) ** 2), jnp.where(x > 4, 1e9, x)[None], hg.SGD(0.01, 0.5),
                     hg.full_batch(jnp.zeros(1)), steps=2).params[0]  # fmt: skip
        return 100 * (w - 3.0) ** 2

    result = hg.optimize(f, lambda v: v, {"x": 1.0}, meta_optimizer=optax.lbfgs(), meta_steps=8)
    assert result.history[-1].value < 1e-3


def test_a_line_search_goes_on_with_the_seeds_that_did_not_fail() -> None:
    def f(hypers: Any, key: Any) -> Any:
        return jnp.where(jax.random.uniform(key) < 0.5, jnp.nan, (hypers["x"] - 3.0) ** 2)

    options = {"meta_optimizer": optax.lbfgs(), "meta_steps": 3, "seeds_per_step": 4, "skip_nonfinite": True}
    result = hg.optimize(f, lambda v: v, {"x": 1.0}, **options)
    assert 0 < result.history[0].failed_seeds < 4
    assert result.history[-1].value < 1e-3


@pytest.mark.long
def test_a_line_search_gets_the_room_that_an_evaluation_found_missing() -> None:
    """128 steps at momentum 0.3 lose 222 bits: the second start needs larger buffers than the first was compiled for."""

    def f(hypers: Any, key: Any) -> Any:
        quadratic = lambda w, theta, y: jnp.sum((w - y) ** 2)  # noqa: E731
        sgd, still = hg.SGD(1e-4, hypers["m"]), hg.full_batch(jnp.zeros(1))
        return hg.train(quadratic, hypers["x"][None], sgd, still, steps=128).params[0]

    starts = [{"x": 3.0, "m": hg.fixed(jnp.float32(m))} for m in (0.9, 0.3)]
    results = hg.restarts(f, lambda w: (w - 1.0) ** 2, starts, meta_optimizer=optax.lbfgs(), meta_steps=5)
    assert results[0].history[0].status.words != results[1].history[0].status.words
    assert all(r.history[-1].value < 1e-6 * r.history[0].value for r in results)


def test_a_third_split_decides_on_the_best_step_and_when_to_stop() -> None:
    """The value falls for ever; the monitor rises from the third step on."""
    stopping = hg.callbacks.EarlyStopping(patience=3)
    result = hg.optimize(
        lambda h, key: h, lambda h: h, 1.0, monitor_fn=lambda h: (h - 0.8) ** 2, meta_steps=20,
        meta_optimizer=optax.sgd(0.1), callbacks=[stopping],
    )  # fmt: skip
    assert result.best.step == 2
    assert len(result.history) == 6
    np.testing.assert_allclose(result.history[0].monitor, 0.04, rtol=1e-5)
    assert result.history[-1].value < result.best.value


def test_early_stopping_without_a_third_split_watches_the_value() -> None:
    history = [hg.MetaStep(i, v, 1.0, 0.0, None, 0.0, None) for i, v in enumerate([3.0, 2.0, math.nan, 2.5, 1.95, 2.0])]
    patient = hg.callbacks.EarlyStopping(patience=2, tolerance=0.1)
    assert [done.step for done in history if patient(done)] == [3, 4, 5]
    patient.begin(history[:2])
    assert not patient(history[2])
    assert patient(history[3])
    with pytest.raises(ValueError, match="EarlyStopping needs patience >= 1"):
        hg.callbacks.EarlyStopping(patience=0)


def test_restarts_find_what_one_start_does_not_and_compile_once() -> None:
    calls = []

    def two_valleys(h: Any, key: Any) -> Any:
        calls.append(0)
        return jnp.where(h > 0, (h - 1) ** 2 + 0.5, (h + 1) ** 2)

    options = {"meta_steps": 30, "meta_optimizer": optax.adam(0.2)}
    stuck = hg.optimize(two_valleys, lambda x: x, 0.5, **options)
    calls.clear()
    best, *others = hg.restarts(two_valleys, lambda x: x, [0.5, -0.5, 2.0], **options)
    assert len(calls) == 1
    assert best.best.value < 0.1 < stuck.best.value
    assert [r.best.value for r in others] == sorted(r.best.value for r in others)
    np.testing.assert_allclose(others[0].best.value, stuck.best.value, rtol=1e-6)


def test_a_start_that_fails_is_left_out() -> None:
    starts = [{"learning_rate": hg.positive(rate)} for rate in (1e12, 0.05)]
    with pytest.warns(UserWarning, match="start 0 of hg.restarts is left out: .* range"):
        (result,) = hg.restarts(trainer(), val_fn, starts, meta_steps=1)
    assert math.isfinite(result.best.value)
    with pytest.warns(UserWarning, match="left out"), pytest.raises(hg.RangeError):
        hg.restarts(trainer(), val_fn, starts[:1], meta_steps=1)
    with pytest.raises(ValueError, match="`starts` of hg.restarts is empty"):
        hg.restarts(trainer(), val_fn, [])


def test_scatter_moves_what_is_learned_and_keeps_domains() -> None:
    hypers = {"a": hg.positive(jnp.ones(1000)), "m": hg.unit_interval(0.5), "k": hg.fixed(0.1), "free": 2.0}
    moved = hg.scatter(hypers, jax.random.key(0), 0.5)
    assert jax.tree.structure(moved) == jax.tree.structure(hypers)
    assert abs(float(jnp.std(moved["a"].unconstrained)) - 0.5) < 0.05
    assert moved["k"].unconstrained == np.float32(0.1)
    assert moved["m"].unconstrained != hypers["m"].unconstrained
    again = hg.scatter(hypers, jax.random.key(0), 0.5)
    np.testing.assert_array_equal(moved["a"].unconstrained, again["a"].unconstrained)


def test_bounds_that_are_hit_are_reported() -> None:
    hypers = {"m": hg.unit_interval(jnp.array([0.5, 0.9999])), "b": hg.bounded(2.0001, 2.0, 3.0), "free": 1.0}
    expected = (
        "hypers['b']: is at the lower bound 2",
        "hypers['m']: 1 of 2 values are at the upper bound 0.999985",
    )
    done = hg.MetaStep(0, 1.0, 1.0, 0.0, None, 0.0, hypers)
    assert done.at_bounds == expected
    file = io.StringIO()
    hg.callbacks.Progress(file)(done)
    assert file.getvalue().rstrip().endswith(expected[1])


def test_progress_shows_what_there_is() -> None:
    file = io.StringIO()
    progress = hg.callbacks.Progress(file)
    done = hg.MetaStep(3, 1.0, 2.0, 0.1, None, 0.0, 1.0, value_error=0.25, gradient_error=0.5, failed_seeds=2, monitor=4.0)
    progress.begin([done])
    progress(done)
    assert file.getvalue().splitlines() == [
        "going on after meta-step 3, compiling: up to a minute for large models",
        "meta-step    3   value 1 +- 0.25   monitor 4   |gradient| 2, 4.0 times its noise   0.10 s   2 failed",
    ]
    progress(done._replace(gradient_error=math.nan, failed_seeds=0, clipped_seeds=1, growth=1e4))
    assert file.getvalue().endswith("|gradient| 2   0.10 s   1 clipped   training amplifies 1e+04 times\n")


@pytest.mark.long
def test_what_a_diverging_seed_has_does_not_hide_what_others_need() -> None:
    """They lack room for digits: it grows, and they go well."""
    first = jax.random.key_data(jax.random.split(jax.random.fold_in(jax.random.key(0), 0), 3)[0])

    def train_fn(h: Any, key: Any) -> Any:
        start = jnp.where((jax.random.key_data(key) == first).all(), jnp.inf, 1.0) * jnp.ones(3)
        of = lambda w, _, x: jnp.sum((w - x) ** 2)  # noqa: E731
        return hg.train(of, start, hg.SGD(0.01, h["m"]), hg.full_batch(jnp.float32(0)), steps=100).params

    done = hg.optimize(
        train_fn, lambda w: jnp.sum(w**2), {"m": hg.unit_interval(0.2)}, meta_steps=1, seeds_per_step=3, skip_nonfinite=True
    ).history[0]  # 2.3 bits a step, where one is guessed
    assert done.failed_seeds == 1 and math.isfinite(done.value)


def test_a_monitor_that_is_nan_is_no_value() -> None:
    """Else the step would be judged by another number than the others."""
    monitor = lambda h: jnp.where(h < 0.9, jnp.nan, 5 + h)  # noqa: E731
    with pytest.warns(UserWarning, match="`monitor_fn` gives NaN or infinity: a meta-step with such a number is never"):
        result = hg.optimize(
            lambda h, key: h, lambda h: h**2, 1.0, monitor_fn=monitor, meta_steps=4, meta_optimizer=optax.sgd(0.1)
        )
    assert result.best.step == 0 and result.history[-1].judged == math.inf
