"""`hypergradient` and `optimize` on a regression of three weights: the meta-loop does what it says, and no more."""

import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hypergrad as hg


STEPS = 8
RNG = np.random.default_rng(0)
TRAIN, TEST = ((x := RNG.normal(size=(12, 3)).astype(np.float32), x @ np.float32([1, -2, 0.5])) for _ in range(2))


def loss(w: Any, theta: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((x @ w - y) ** 2) + theta * jnp.sum(w**2)


def trainer(steps: int = STEPS, **options: Any) -> Callable[[Any, Any], Any]:
    """A `train_fn`, with the number of times that Python ran it in `calls`."""

    def train_fn(hypers: Any, key: Any) -> Any:
        train_fn.calls += 1
        start = hypers.get("scale", 1.0) * jax.random.normal(key, 3)
        batches = hg.minibatches(TRAIN, 4, key, replacement=True)
        sgd = hg.SGD(hypers["learning_rate"], hypers.get("momentum", 0.5))
        return hg.train(loss, start, sgd, batches, theta=hypers.get("penalty", 0.0), steps=steps, **options).params

    train_fn.calls = 0
    return train_fn


def val_fn(w: Any) -> jax.Array:
    return loss(w, 0.0, TEST)


def hypers() -> dict[str, Any]:
    return {
        "learning_rate": hg.positive(hg.PerStep(jnp.full(STEPS, 0.05))),
        "momentum": hg.unit_interval(0.5),
        "penalty": hg.positive(1e-2),
        "scale": 1.0,
    }


RATE = {"learning_rate": hg.positive(0.05)}


def test_a_hypergradient_is_the_gradient_by_hand() -> None:
    key = jax.random.key(5)
    value, grads = hg.hypergradient(trainer(), val_fn, hypers(), key)

    def by_hand(u: Any) -> jax.Array:
        p = 2.0**-16 + (1 - 2.0**-15) * jax.nn.sigmoid(u["momentum"])
        natural = {"learning_rate": hg.PerStep(jnp.exp(u["learning_rate"])), "momentum": p}
        return val_fn(trainer()(natural | {"penalty": jnp.exp(u["penalty"]), "scale": u["scale"]}, key))

    u = {"learning_rate": jnp.full(STEPS, jnp.log(0.05)), "momentum": 0.0, "penalty": jnp.log(0.01), "scale": 1.0}
    expected_value, expected = jax.value_and_grad(by_hand)(u)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(hypers())
    np.testing.assert_allclose(grads["learning_rate"].unconstrained.values, expected["learning_rate"], rtol=1e-4)
    for name in ("momentum", "penalty"):
        np.testing.assert_allclose(grads[name].unconstrained, expected[name], rtol=1e-4)
    np.testing.assert_allclose(grads["scale"], expected["scale"], rtol=1e-4)


def test_optimize_lowers_the_value_in_one_compilation() -> None:
    train_fn, seen = trainer(), []
    result = hg.optimize(train_fn, val_fn, hypers(), meta_steps=12, meta_optimizer=optax.adam(0.2), callbacks=[seen.append])
    assert train_fn.calls == 1
    assert result.history[-1].value < 0.5 * result.history[0].value
    assert [done.step for done in result.history] == list(range(12))
    assert seen == result.history
    assert result.best == min(result.history, key=lambda done: done.value)
    assert all(done.seconds > 0 and done.gradient_norm > 0 and done.status.ok for done in result.history)
    momentum = float(hg.natural(result.history[-1].hypers)["momentum"])
    words_and_head = result.history[-1].bits_per_parameter_step * STEPS
    assert STEPS * -np.log2(momentum) <= words_and_head <= STEPS * -np.log2(momentum) + 17
    value, _ = hg.hypergradient(
        trainer(), val_fn, result.best.hypers, jax.random.fold_in(jax.random.key(0), result.best.step)
    )
    np.testing.assert_allclose(value, result.best.value, rtol=1e-5)


@pytest.mark.long
def test_the_first_step_by_hand() -> None:
    result = hg.optimize(trainer(), val_fn, RATE, meta_steps=1, meta_optimizer=optax.sgd(0.5))
    value, grads = hg.hypergradient(trainer(), val_fn, RATE, jax.random.fold_in(jax.random.key(0), 0))
    (done,) = result.history
    np.testing.assert_allclose(done.value, value, rtol=1e-6)
    gradient = grads["learning_rate"].unconstrained
    np.testing.assert_allclose(done.gradient_norm, jnp.abs(gradient), rtol=1e-5)
    moved = RATE["learning_rate"].unconstrained - 0.5 * gradient
    np.testing.assert_allclose(result.hypers["learning_rate"].unconstrained, moved, rtol=1e-5)
    np.testing.assert_array_equal(done.hypers["learning_rate"].unconstrained, RATE["learning_rate"].unconstrained)


def test_a_buffer_that_must_grow_costs_one_more_compilation() -> None:
    """128 steps at momentum 0.3 lose 222 bits; a momentum that is learned is given one bit a step at first."""
    train_fn = trainer(128)
    learned = {"learning_rate": hg.positive(0.01), "momentum": hg.unit_interval(0.3)}
    result = hg.optimize(train_fn, val_fn, learned, meta_steps=4)
    assert train_fn.calls == 2
    assert len(result.history) == 4
    needed = 128 * -np.log2(0.3)
    assert needed * 0.95 < result.history[0].bits_per_parameter_step * 128 < needed * 1.05 + 64
    assert result.history[0].status.words >= 5


def test_meta_step_i_uses_the_key_folded_with_i() -> None:
    train_fn = lambda h, key: h * jax.random.uniform(key)  # noqa: E731
    for key in (None, jax.random.key(3), jax.random.PRNGKey(3)):
        result = hg.optimize(train_fn, lambda x: x, 1.0, meta_steps=3, meta_optimizer=optax.sgd(0.0), key=key)
        base = jax.random.key(0) if key is None else key
        expected = [jax.random.uniform(jax.random.fold_in(base, i)) for i in range(3)]
        np.testing.assert_allclose([done.value for done in result.history], expected, rtol=1e-6)


@pytest.mark.long
def test_what_is_fixed_stays() -> None:
    learned = {"learning_rate": hg.positive(0.05), "momentum": hg.fixed(0.9), "scale": hg.fixed(jnp.float32(0.7))}
    result = hg.optimize(trainer(), val_fn, learned, meta_steps=3)
    assert result.hypers["momentum"].unconstrained == np.float32(0.9)
    assert result.hypers["scale"].unconstrained == np.float32(0.7)
    assert result.hypers["learning_rate"].unconstrained != learned["learning_rate"].unconstrained
    _, grads = hg.hypergradient(trainer(), val_fn, learned)
    assert grads["scale"].unconstrained == 0


@pytest.mark.long
def test_the_host_driver_learns_the_same_without_jit() -> None:
    options = {"meta_steps": 2, "meta_optimizer": optax.sgd(0.1)}
    host = trainer(4, adjoint=hg.Reversible(driver="host"))
    slow = hg.optimize(host, val_fn, RATE, jit=False, **options)
    fast = hg.optimize(trainer(4), val_fn, RATE, **options)
    assert host.calls == 2
    rates = [result.hypers["learning_rate"].unconstrained for result in (slow, fast)]
    np.testing.assert_allclose(*rates, rtol=1e-5)
    assert slow.history[0].bits_per_parameter_step == fast.history[0].bits_per_parameter_step > 0


def test_any_optax_chain_is_a_meta_optimizer() -> None:
    clipped = optax.chain(optax.clip_by_global_norm(0.01), optax.scale_by_learning_rate(lambda count: 1.0 / (1 + count)))
    result = hg.optimize(trainer(), val_fn, RATE, meta_steps=3, meta_optimizer=clipped)
    assert all(done.gradient_norm > 0.01 for done in result.history)
    path = [done.hypers["learning_rate"].unconstrained for done in result.history]
    path.append(result.hypers["learning_rate"].unconstrained)
    np.testing.assert_allclose(np.abs(np.diff(path)), [0.01, 0.01 / 2, 0.01 / 3], rtol=1e-4)


@pytest.mark.long
def test_unrolled_runs_can_be_optimized_too() -> None:
    options = {"meta_steps": 2, "meta_optimizer": optax.sgd(0.1)}
    results = [hg.optimize(trainer(adjoint=a), val_fn, RATE, **options) for a in (hg.Unrolled(), hg.Reversible())]
    np.testing.assert_allclose(*(r.hypers["learning_rate"].unconstrained for r in results), rtol=1e-5)


def quick(**options: Any) -> hg.Result:
    """A meta-loop without training: the value is h^2, and falls."""
    return hg.optimize(lambda h, key: h, lambda h: h**2, 1.0, meta_optimizer=optax.sgd(0.1), **options)


def test_no_training_no_status() -> None:
    result = quick(meta_steps=2)
    assert result.history[0].status is None
    assert result.history[0].bits_per_parameter_step == 0
    np.testing.assert_allclose(result.hypers, 0.64, rtol=1e-6)


def test_a_callback_that_returns_true_stops_and_all_are_called() -> None:
    seen = []
    result = quick(meta_steps=9, callbacks=[lambda done: done.step == 2, seen.append])
    assert len(result.history) == len(seen) == 3


def test_progress_is_a_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    quick(meta_steps=2, callbacks=[hg.callbacks.Progress(file), hg.callbacks.Progress()])
    for text in (file.getvalue(), capsys.readouterr().err):
        compiling, first, second = text.splitlines()
        assert compiling.startswith("compiling")
        assert first.startswith("meta-step    0   value 1   |gradient| 2   ")
        assert second.startswith("meta-step    1   value 0.64   |gradient| 1.6   ")


def test_json_lines_are_appended(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "history.jsonl"
    hg.optimize(trainer(), val_fn, RATE, meta_steps=2, callbacks=[hg.callbacks.JsonLines(path)])
    quick(meta_steps=1, callbacks=[hg.callbacks.JsonLines(str(path))])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 0]
    assert [record["status"] for record in records] == [0, 0, None]
    assert records[2]["value"] == 1.0
    assert records[2]["gradient_norm"] == 2.0
    assert records[0]["bits_per_parameter_step"] > 0
    assert all(record["seconds"] > 0 for record in records)


def norms(*values: float) -> list[hg.MetaStep]:
    return [hg.MetaStep(i, 0.0, norm, 0.0, None, 0.0, None) for i, norm in enumerate(values)]


@pytest.mark.parametrize(
    ("gradients", "stops"),
    [
        ((1, 2, 9.9, 9.9, 9.9), []),
        ((5, 1, 11, 11, 3, 11, 11, 11), []),  # a dip is no measure
        ((5, 1, 40, 40, 3, 40, 40, 40), [7]),
        ((0, 0, 0, 7, 7, 7), []),  # nor is nothing
        ((1, 20, 20, 20, 20), [3, 4]),
        ((1, float("nan"), float("nan"), float("nan")), [3]),
    ],
)
def test_stop_on_growth(gradients: tuple[float, ...], stops: list[int]) -> None:
    callback = hg.callbacks.StopOnGrowth(factor=10, patience=3)
    assert [done.step for done in norms(*gradients) if callback(done)] == stops
    falling = [done._replace(value=-float(done.step)) for done in norms(*gradients)]
    callback.begin(None)
    assert not any(map(callback, falling))


@pytest.mark.parametrize(
    ("growths", "stops"), [((5, 2000, 2000, 2000), [3]), ((500, 2000, 2000, 2000), []), ((5, 900, 900, 900), [])]
)
def test_stop_on_growth_of_what_is_behind_the_hypergradient(growths: tuple[float, ...], stops: list[int]) -> None:
    history = [d._replace(growth=g) for d, g in zip(norms(1, 1, 1, 1), growths, strict=True)]
    callback = hg.callbacks.StopOnGrowth()
    assert [done.step for done in history if callback(done)] == stops


@pytest.mark.parametrize("arguments", [(1.0, 3), (0.5, 3), (10.0, 0), (float("nan"), 3)])
def test_stop_on_growth_refuses_what_never_grows(arguments: tuple[float, int]) -> None:
    with pytest.raises(ValueError, match="StopOnGrowth needs factor > 1 and patience >= 1"):
        hg.callbacks.StopOnGrowth(*arguments)


def test_the_gradient_of_what_is_fixed_is_zero_of_integers_too() -> None:
    _, grads = hg.hypergradient(
        lambda h, key: h["x"] * h["n"], lambda x: x, {"x": 2.0, "n": hg.fixed(7), "m": hg.fixed(jnp.arange(3))}
    )
    assert [np.sum(x) for x in jax.tree.leaves((grads["n"], grads["m"]))] == [0, 0]
