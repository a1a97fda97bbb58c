"""`diagnose`, on a linear recurrence whose growth is known, on networks, and where there is nothing to see."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of
from tiny import fails

import hypergrad as hg
from hypergrad._diagnose import GROWTH, judge
from hypergrad._report import Trace, probe
from hypergrad.errors import Status


STEPS = 60
CURVATURE = np.array([1.0, 0.3, 0.05], np.float32)


def quadratic(w: Any, theta: Any, batch: Any) -> jax.Array:
    return jnp.sum(batch * w**2) / 2 + 0 * theta


def logcosh(w: Any, _: Any, batch: Any) -> jax.Array:
    return jnp.sum(jnp.logaddexp(w, -w) * batch)


def train_fn(h: Any, key: Any) -> jax.Array:
    sgd = hg.SGD(h["learning_rate"], hg.PerStep(jnp.full(STEPS, h["momentum"])))
    return hg.train(quadratic, h["start"] * jnp.ones(3), sgd, hg.full_batch(CURVATURE), theta=h["theta"], steps=STEPS).params


@functools.cache
def diagnosed(low: float, high: float, jump: int = 0, momentum: float = 0.5, start: float = 0.0) -> hg.Diagnosis:
    """The learning rate jumps from `low` to `high` at step `jump`; all values share one compilation."""
    rate = hg.PerStep(jnp.where(jnp.arange(STEPS) < jump, low, high))
    h = {"learning_rate": rate, "momentum": momentum, "start": start, "theta": 0.0}
    return hg.diagnose(train_fn, jnp.sum, h)


def spectral_radius(rate: float, momentum: float = 0.5, curvature: float = 1.0) -> float:
    g = (1 - momentum) * curvature
    return max(abs(np.linalg.eigvals([[momentum, -g], [rate * momentum, 1 - rate * g]])))


def test_small_rates_are_healthy() -> None:
    d = diagnosed(0.05, 0.05)
    assert d.verdict == "healthy" and d.onset is None and d.until is None and d.growth < 3
    assert "Nothing to do" in str(d) and d.runs == 1 and d.status.ok


# What enters on the way: at all steps, at one, and by way of the velocity alone.
ON_THE_WAY = {
    "losses": lambda run: run.losses.mean(),
    "a loss": lambda run: run.losses[35],
    "metrics": lambda run: jnp.sum(run.metrics),
    "velocity": lambda run: jnp.sum(run.state["velocity"]),
}


@pytest.mark.parametrize("read", ON_THE_WAY)
def test_what_comes_in_on_the_way_is_not_growth(read: str) -> None:
    measured = {"metric": lambda w, theta, batch, state, hypers: jnp.sum(jnp.sin(w))} if read == "metrics" else {}

    def train_fn(h: Any, _: Any) -> Any:
        start, batches = h["start"] * jnp.ones(3), hg.full_batch(CURVATURE)
        return hg.train(quadratic, start, hg.SGD(h["rate"], 0.5), batches, theta=0.0, steps=40, **measured)

    sound, unstable = (hg.diagnose(train_fn, ON_THE_WAY[read], {"rate": r, "start": 1e-3}) for r in (0.1, 6.3))
    assert sound.growth < 3 and sound.verdict == "healthy" and sound.norms.keys() == {"params", "velocity"}
    assert unstable.verdict == "exploding" and 0.9 < unstable.growth_per_step / spectral_radius(6.3) < 1.1


@pytest.mark.parametrize("rate", [6.3, 9.0])
def test_growth_per_step_is_the_spectral_radius(rate: float) -> None:
    d = diagnosed(rate, rate)
    assert d.verdict == "exploding" and d.onset <= 3
    np.testing.assert_allclose(d.growth_per_step, spectral_radius(rate), rtol=0.03)
    np.testing.assert_allclose(d.growth, spectral_radius(rate) ** STEPS, rtol=0.9)


@pytest.mark.parametrize("jump", [15, 30, 40])
def test_the_onset_is_where_the_rate_becomes_too_large(jump: int) -> None:
    d = diagnosed(0.1, 9.0, jump)
    assert d.verdict == "exploding" and abs(d.onset - jump) <= 4 and d.until >= STEPS - 3
    assert f"from step {d.onset} on" in d.explain() and "Lower the learning rate" in d.explain()


def test_norms_are_those_of_the_hypergradient() -> None:
    """The first norms are the gradient with respect to the initial state, the last that of `val_fn`."""
    d = diagnosed(0.1, 9.0, 30)
    np.testing.assert_allclose(d.norms["params"][-1], np.sqrt(3), rtol=1e-6)
    assert d.norms["velocity"][-1] == 0 and all(len(n) == STEPS + 1 for n in d.norms.values())
    rates = jnp.where(jnp.arange(STEPS) < 30, 0.1, 9.0)

    def final(w: Any, v: Any) -> jax.Array:
        sgd = hg.SGD(hg.PerStep(rates), hg.PerStep(jnp.full(STEPS, 0.5)))
        batches = hg.full_batch(CURVATURE)
        return jnp.sum(hg.train(quadratic, w, sgd, batches, theta=0.0, steps=STEPS, state={"velocity": v}).params)

    dw, dv = jax.grad(final, argnums=(0, 1))(jnp.zeros(3), jnp.zeros(3))
    np.testing.assert_allclose(d.norms["params"][0], jnp.linalg.norm(dw), rtol=1e-5)
    np.testing.assert_allclose(d.norms["velocity"][0], jnp.linalg.norm(dv), rtol=1e-5)


def test_contraction_is_vanishing_not_exploding() -> None:
    h = {"learning_rate": hg.PerStep(jnp.full(STEPS, 1.0)), "momentum": 0.5, "start": 0.0, "theta": 0.0}
    d = hg.diagnose(train_fn, lambda w: w[0], h)
    assert d.verdict == "vanishing" and 0.6 < d.growth_per_step < 0.8 and "take fewer steps" in d.explain().lower()
    expected = STEPS - np.log(1e-6) / np.log(spectral_radius(1.0))
    assert abs(d.onset - expected) <= 6


def test_a_derivative_that_overflows_is_reported_not_raised() -> None:
    d = diagnosed(60.0, 60.0)  # it stays at zero, exactly; its derivative does not
    assert d.verdict == "exploding" and d.status.ok and d.value == 0 and not np.isfinite(d.gradient_norm)
    assert "beyond the range" in d.explain() and d.onset > 0
    np.testing.assert_allclose(d.growth_per_step, spectral_radius(60.0), rtol=0.03)


def test_training_that_fails_is_reported_not_raised() -> None:
    d = diagnosed(60.0, 60.0, start=1.0)
    assert d.verdict == "not finite" and not d.status.ok
    assert "training itself failed" in d.explain() and "left the range" in d.explain()
    assert np.isfinite(d.losses[: int(d.status.step)]).all()


def test_a_value_that_is_not_finite_is_not_the_training_s_fault() -> None:
    h = {"learning_rate": hg.PerStep(jnp.full(STEPS, 0.05)), "momentum": 0.5, "start": 0.0, "theta": 0.0}
    d = hg.diagnose(train_fn, lambda w: jnp.sum(w) * jnp.nan, h)
    assert d.verdict == "not finite" and d.status.ok and "look at `val_fn`" in d.explain()


STATUS = Status(*(np.int32(0),) * 7, ("params",), (1.0,))


def judged(norms: Any) -> hg.Diagnosis:
    return judge(Trace(STATUS, np.zeros(len(norms) - 1), {"params": np.asarray(norms)}), 1.0, 1.0, 1)


def test_verdicts_on_norms_made_by_hand() -> None:
    """Growth by a hundred alarms, a little less does not, wherever it lies; so does falling below a millionth."""
    flat, rise = np.zeros(100), np.linspace(1, 0, 50)
    for norms in ([*rise, *flat], [*(1 + flat), *rise], [*(1 + flat), *rise, *flat]):
        assert judged((1.01 * GROWTH) ** np.array(norms)).verdict == "exploding"
        assert judged((0.99 * GROWTH) ** np.array(norms)).verdict == "healthy"
    assert judged(10.0 ** np.linspace(-6.1, 0, 100)).verdict == "vanishing"
    assert judged(10.0 ** np.linspace(-5.9, 0, 100)).verdict == "healthy"
    nothing = judged(np.zeros(10))  # of a value that does not see them, or is at its minimum
    assert nothing.verdict == "vanishing" and re.search("does not depend.* or is at a minimum", nothing.explain())
    lost = judged([np.nan, np.nan, 1.0, 1.0])
    assert lost.verdict == "not finite" and lost.onset == 1 and "sqrt(0)" in lost.explain()


@pytest.mark.long
def test_a_probe_changes_no_bit_and_sees_compiled_and_batched_runs() -> None:
    def one(rate: Any, key: Any) -> Any:
        sgd, batches = hg.SGD(rate, 0.5), hg.full_batch(CURVATURE)
        return hg.train(logcosh, jnp.ones(3), sgd, batches, steps=6).params

    compiled = jax.jit(one)
    value, gradient = hg.hypergradient(compiled, jnp.sum, 0.3)  # compiled without a probe
    for _ in range(2):
        d = hg.diagnose(compiled, jnp.sum, 0.3)
        assert d.verdict == "healthy" and d.runs == 1
        assert float(value) == d.value and abs(float(gradient)) == d.gradient_norm
    batched = lambda h, key: jax.vmap(lambda s: one(s * h, key))(jnp.array([1.0, 2.0]))  # noqa: E731
    d = hg.diagnose(batched, jnp.sum, 0.3)
    assert d.runs == 2 and "the worst of 2" in str(d)


def test_a_run_that_cannot_be_looked_into_is_an_error() -> None:
    with fails(ValueError, "no reverse pass", "adjoint=hg.Reversible()"):
        hg.diagnose(lambda h, key: h, lambda h: h**2, 0.3)


@some_of("rule", [hg.SGD, hg.HeavyBall], hg.SGD)
def test_rates_beside_the_curvature(rule: Any) -> None:
    """Of a quadratic with curvatures b the limit is 2 (1 + m) / max(a b), in the rates of heavy ball."""
    rates = np.array([0.5, 0.5, 4.5, 3.5, 0.5, 0.5], np.float32)
    share = 0.5 if rule is hg.SGD else 1.0

    def train_fn(h: Any, key: Any) -> jax.Array:
        optimizer = rule(hg.PerStep(h.values / share), 0.5)
        return hg.train(quadratic, jnp.ones(3), optimizer, hg.full_batch(CURVATURE), theta=0.0, steps=len(rates)).params

    d = hg.diagnose(train_fn, jnp.sum, hg.PerStep(rates), curvature=True)
    np.testing.assert_allclose(d.excess, rates / 3, rtol=1e-5)
    assert "at 2 of 6 steps, from 2 to 3, by a factor of up to 1.5 (step 2)" in str(d)
    assert hg.diagnose(train_fn, jnp.sum, hg.PerStep(rates)).excess is None
    below = hg.diagnose(train_fn, jnp.sum, hg.PerStep(rates / 10), curvature=True)
    assert "stay below" in str(below) and "they come to 0.15 of it, at step 2" in str(below)


def test_rates_of_each_weight_beside_the_curvature() -> None:
    rates = np.array([1.0, 2.0, 30.0], np.float32)
    run = lambda h, key: hg.train(logcosh, jnp.zeros(3), hg.HeavyBall(h, 0.5), hg.full_batch(CURVATURE), steps=1).params  # noqa: E731
    d = hg.diagnose(run, jnp.sum, rates, curvature=True)
    np.testing.assert_allclose(d.excess, [np.max(rates * CURVATURE) / 3], rtol=1e-3)


def test_what_has_no_limit_that_is_known_says_nothing_of_it() -> None:
    run = lambda h, key: hg.train(quadratic, jnp.ones(3), hg.Adam(h), hg.full_batch(CURVATURE), theta=0.0, steps=3).params  # noqa: E731
    assert hg.diagnose(run, jnp.sum, 0.1, curvature=True).excess is None


def test_rates_of_a_run_that_fails() -> None:
    def run(h: Any, key: Any) -> jax.Array:
        return hg.train(quadratic, jnp.ones(3), hg.HeavyBall(h, 0.5), hg.full_batch(CURVATURE), theta=0.0, steps=40).params

    d = hg.diagnose(run, jnp.sum, 9.0, curvature=True)
    assert d.verdict == "not finite" and "Learning rates exceed" in str(d)


def test_the_largest_curvature_is_not_the_most_negative() -> None:
    saddle = lambda w, _, batch: jnp.sum(jnp.array([1.0, -3.0, 0.1]) * w**2) / 2  # noqa: E731
    run = lambda h, key: hg.train(saddle, jnp.ones(3), hg.HeavyBall(h, 0.5), hg.full_batch(None), steps=1).params  # noqa: E731
    np.testing.assert_allclose(hg.diagnose(run, jnp.sum, 0.3, curvature=True).excess, [0.3 * 1.0 / 3], rtol=1e-3)


def test_what_a_probe_found_stays_that_of_its_runs() -> None:
    """Whoever asks next, in another thread perhaps, has lists of its own."""
    h = {"learning_rate": 0.1, "momentum": 0.5, "start": 1.0, "theta": 0.0}
    run = jax.grad(lambda h: jnp.sum(train_fn(h, None)))
    with probe() as (first, _):
        run(h)
    with probe() as (second, _):
        pass
    assert len(first) == 1 and not second


def test_the_last_steps_of_a_run_are_not_judged_as_the_whole() -> None:
    adjoint = hg.Truncated(last=2)
    loss, batches = lambda w, _, x: jnp.sum((w - x) ** 2), hg.full_batch(0.0)
    train_fn = lambda h, key: hg.train(loss, jnp.ones(2), hg.SGD(h), batches, steps=5, adjoint=adjoint).params  # noqa: E731
    with fails(ValueError, "hg.diagnose sees the last 2 of 5 steps of a run alone by hg.Truncated"):
        hg.diagnose(train_fn, jnp.sum, 0.1)
