"""The meta-loop where training is unstable: what it says, how it averages seeds, when it stops, and what it keeps."""

import math
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import long
from test_checkpoint import assert_same

import hypergrad as hg
from hypergrad._average import MOST


FLAT = optax.sgd(0.0)
STEPS = 30


def pendulum(w: Any, theta: Any, batch: Any) -> jax.Array:
    return jnp.sum(batch * (1 - jnp.cos(w)))


def train_fn(hypers: Any, key: Any) -> jax.Array:
    """Sound at rates of about 1; from 6 on it is chaotic, and stays in range."""
    batches = hg.full_batch(jnp.array([1.0, 0.3, 0.05]))
    return hg.train(pendulum, jax.random.normal(key, 3), hg.SGD(hypers["rate"], 0.5), batches, theta=0.0, steps=STEPS).params


def energy(w: Any) -> jax.Array:
    return jnp.sum(w**2)


def optimized(rate: float = 1.0, meta_steps: int = 1, **options: Any) -> hg.Result:
    options = {"meta_optimizer": FLAT, **options}
    return hg.optimize(train_fn, energy, {"rate": rate}, meta_steps=meta_steps, **options)


def faster(by: float) -> Any:
    """A meta-optimizer that raises the rate, whatever the hypergradient says."""
    return optax.stateless(lambda updates, params: jax.tree.map(lambda x: jnp.full_like(x, by), updates))


@pytest.mark.parametrize(("seeds", "jit"), [(1, True), long(1, False), long(3, True), long(2, False)])
def test_growth_is_that_of_a_diagnosis(seeds: int, jit: bool) -> None:
    done = optimized(seeds_per_step=seeds, jit=jit).history[0]
    key = jax.random.fold_in(jax.random.key(0), 0)
    keys = [key] if seeds == 1 else jax.random.split(key, seeds)
    expected = max(hg.diagnose(train_fn, energy, {"rate": 1.0}, k).growth for k in keys)
    np.testing.assert_allclose(done.growth, expected, rtol=1e-5)


@pytest.mark.of_bits
def test_watching_changes_no_bit() -> None:
    watched, blind = (optimized(meta_steps=2, meta_optimizer=optax.sgd(0.1), diagnose=d).history for d in (True, False))
    assert [(a.value, a.gradient_norm) for a in watched] == [(b.value, b.gradient_norm) for b in blind]
    assert math.isnan(blind[0].growth) and not math.isnan(watched[0].growth)


@pytest.mark.parametrize("seeds", [long(1), 3])
def test_the_first_meta_step_says_that_training_is_unstable(seeds: int) -> None:
    with pytest.warns(UserWarning, match="hg.optimize, meta-step 0: training is unstable") as caught:
        result = optimized(9.0, seeds_per_step=seeds)
    (text,) = (str(w.message) for w in caught)
    for fragment in (
        "in the worst of 3 runs" if seeds > 1 else "30 steps",
        "Lower the learning rate from step",
        "hg.diagnose",
        "diagnose=False",
    ):
        assert fragment in text, text
    assert result.history[0].growth > 100
    assert math.isnan(optimized(9.0, diagnose=False).history[0].growth)


def test_a_jump_is_told_once_and_growth_stops_the_loop_at_its_best() -> None:
    with pytest.warns(UserWarning) as caught:
        result = optimized(0.5, meta_steps=20, meta_optimizer=faster(2.0))
    jump, stop = (str(w.message) for w in caught)
    assert "the hypergradient has jumped" in jump and "go on from the best step" in jump
    assert "hg.optimize stops at meta-step" in stop and f"`best`, meta-step {result.best.step}." in stop
    assert len(result.history) < 12
    assert result.hypers is result.best.hypers


def test_one_may_go_on_all_the_same() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(optimized(0.5, 12, meta_optimizer=faster(2.0), stop_on_growth=False).history) == 12
        patient = hg.callbacks.StopOnGrowth(patience=20)
        assert len(optimized(0.5, 12, meta_optimizer=faster(2.0), callbacks=[patient]).history) == 12


def test_a_run_that_growth_stopped_is_found_stopped_and_goes_on_where_told(tmp_path: pathlib.Path) -> None:
    def run(folder: Any, meta_steps: int, **options: Any) -> hg.Result:
        return optimized(0.5, meta_steps, meta_optimizer=faster(2.0), checkpoint=folder, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = run(None, 20)
        run(tmp_path, 2)
        first = run(tmp_path, 20)
    assert_same(first, whole)
    assert_same(run(tmp_path, 20), whole)  # in silence: nothing is evaluated
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(run(tmp_path, 21, stop_on_growth=False).history) == 21


def shaken(hypers: Any, key: Any) -> Any:
    """Hypergradients that differ from seed to seed, and one in three that is enormous."""
    scale = jnp.where(jax.random.uniform(key) < 0.2, 1e8, 1.0)
    return scale * jnp.sum(hypers["x"] * (2 + 0.3 * jax.random.normal(key, 4)))


def averaged(aggregate: Any, seeds: int = 6) -> tuple[hg.MetaStep, np.ndarray]:
    """The meta-step, and the mean hypergradient itself: what a descent of rate 1 moves by."""
    options = {"seeds_per_step": seeds, "meta_steps": 1, "meta_optimizer": optax.sgd(1.0), "aggregate": aggregate}
    result = hg.optimize(shaken, lambda v: v, {"x": jnp.zeros(4)}, **options)
    return result.history[0], -np.asarray(result.hypers["x"])


def test_a_seed_that_explodes_does_not_move_the_mean() -> None:
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 0), 6)
    grads = np.array([jax.grad(lambda x, k=k: shaken({"x": x}, k))(jnp.zeros(4)) for k in keys])
    norms = np.linalg.norm(grads, axis=1)
    sound = norms < 1e3
    assert 0 < (~sound).sum() < 3
    done, mean = averaged(None)
    np.testing.assert_allclose(mean, grads[sound].mean(axis=0), rtol=1e-5)
    assert done.clipped_seeds == (~sound).sum()
    error = np.linalg.norm(grads[sound].std(axis=0, ddof=1)) / math.sqrt(sound.sum())
    np.testing.assert_allclose(done.gradient_error, error, rtol=0.15)  # of the few digits beside 1e8
    done, mean = averaged("mean")
    np.testing.assert_allclose(mean, grads.mean(axis=0), rtol=1e-5)
    assert done.clipped_seeds == 0


def test_a_seed_counts_for_no_more_than_some_medians() -> None:
    """Slopes 1, 1, 1, and a fourth: the mean of those that are clipped is weighed by (MOST / slope)^2."""
    slopes = lambda last: jnp.array([1.0, 1.0, 1.0, last])  # noqa: E731
    for last in (2.9, 3.1, 30.0):
        numbers = iter(slopes(last))
        fn = lambda h, key: h * next(numbers)  # noqa: B023, E731
        done = hg.optimize(fn, lambda v: v, 1.0, seeds_per_step=4, meta_steps=1, jit=False).history[0]
        weight = min(1.0, (MOST / last) ** 2)
        np.testing.assert_allclose(done.gradient_norm, (3 + weight * last) / (3 + weight), rtol=1e-5)
        assert done.clipped_seeds == (last > MOST)


def test_most_seeds_that_depend_on_nothing_do_not_hide_one_that_does() -> None:
    numbers = iter([0.0, 0.0, 3.0])
    done = hg.optimize(
        lambda h, key: h * next(numbers), lambda v: v, 1.0, seeds_per_step=3, meta_steps=1, jit=False
    ).history[0]
    assert done.gradient_norm == 1.0 and done.clipped_seeds == 0


def test_a_line_search_descends_the_mean() -> None:
    options = {"meta_optimizer": optax.lbfgs(), "seeds_per_step": 6, "meta_steps": 1}
    done = hg.optimize(shaken, lambda v: v, {"x": jnp.ones(4)}, **options).history[0]
    assert done.clipped_seeds == 0 and done.gradient_norm > 1e6


def test_an_unknown_aggregate_is_an_error() -> None:
    with pytest.raises(ValueError, match='`aggregate` must be "clipped", "mean", or None'):
        optimized(aggregate="median")


def test_norms_are_kept_by_hyperparameter() -> None:
    hypers = {"a": hg.positive(hg.PerStep(jnp.ones(4))), "b": {"c": 2.0}, "still": hg.fixed(1.0)}
    train = lambda h, key: jnp.sum(h["a"].values) * h["b"]["c"]  # noqa: E731
    done = hg.optimize(train, lambda v: v, hypers, meta_steps=1).history[0]
    assert done.gradients == {"a": 4.0, "b/c": 4.0}
    record = done.record()
    assert record["gradients"] == done.gradients and record["signal_to_noise"] is None
    ones = dict.fromkeys(("min", "max", "mean", "first", "last"), 1.0)
    assert record["hypers"] == {"a": ones, "b/c": 2.0}
    alone = hg.optimize(lambda h, key: h**2, lambda v: v, 1.5, meta_steps=1).history[0]
    assert alone.gradients == {"hypers": 3.0} and alone.record()["hypers"] == {"hypers": 1.5}
