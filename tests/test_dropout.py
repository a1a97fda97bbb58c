"""`hg.concrete_dropout`: a mask like dropout's, and the derivative of training in its rate."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import cross_entropy, network

import hypergrad as hg


STEPS = 8
NET = network("tanh")
KEY = jax.random.key(0)


def test_masks_are_those_of_dropout() -> None:
    rate, x = jnp.array([0.1, 0.5, 0.8]), jnp.ones((20_000, 3))
    kept = hg.concrete_dropout(KEY, x, rate, 0.01) * (1 - rate)
    np.testing.assert_allclose(jnp.mean(kept > 0.5, axis=0), 1 - rate, atol=0.01)
    assert jnp.mean((kept > 0.01) & (kept < 0.99)) < 0.05
    np.testing.assert_allclose(jnp.mean(hg.concrete_dropout(KEY, x, rate), axis=0), 1.0, atol=0.06)
    assert hg.concrete_dropout(KEY, x.astype(jnp.bfloat16), 0.5).dtype == jnp.bfloat16


def dropped(params: Any, rate: Any, batch: Any) -> jax.Array:
    (x, y), key = batch
    hidden = hg.concrete_dropout(key, jnp.tanh(x @ params["w1"]), rate, 0.2)
    return cross_entropy(hidden @ params["w2"], y)


def trained(loss: Any, rate: Any, dtype: Any = jnp.float32, **options: Any) -> Any:
    batches = lambda t: (jax.tree.map(jnp.asarray, NET.data), jax.random.fold_in(KEY, t))  # noqa: E731
    return hg.train(loss, NET.params(dtype), hg.SGD(0.5, 0.8), batches, theta=rate, steps=STEPS, **options).params


@pytest.mark.long
def test_the_hypergradient_of_a_rate_agrees_with_differences() -> None:
    with jax.enable_x64(True):
        rates = {"all": jnp.array(0.3), "each": jnp.linspace(0.2, 0.6, NET.params()["w1"].shape[1])}
        for rate in rates.values():
            hg.testing.check_hypergradient(
                jax.jit(lambda r: NET.value(trained(dropped, r, jnp.float64))), rate, tolerance=1e-6
            )


def test_the_roads_agree() -> None:
    f = lambda r, **o: NET.value(trained(dropped, r, **o))  # noqa: E731
    np.testing.assert_allclose(jax.grad(f)(0.3), jax.grad(lambda r: f(r, adjoint=hg.Unrolled()))(0.3), rtol=1e-4)


def test_a_rate_that_is_stopped_is_warned_of_as_dropout() -> None:
    def stopped(params: Any, rate: Any, batch: Any) -> jax.Array:
        (x, y), key = batch
        return cross_entropy(eqx.nn.Dropout(rate)(jnp.tanh(x @ params["w1"]), key=key) @ params["w2"], y)

    def train_fn(hypers: Any, key: Any) -> Any:
        return trained(stopped, hypers["rate"])

    with pytest.warns(UserWarning, match=r"exactly zero in every.*hg.concrete_dropout"):
        hg.hypergradient(train_fn, NET.value, {"rate": hg.unit_interval(0.5)})


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, float("nan"), np.array([0.5, 1.0])])
def test_rates_at_their_ends(rate: Any) -> None:
    with pytest.raises(ValueError, match=r"hg.concrete_dropout: `rate` must be in \(0, 1\); got .*leave it out"):
        hg.concrete_dropout(KEY, jnp.ones(2), rate)


def test_other_arguments() -> None:
    with pytest.raises(ValueError, match="`temperature` must be above 0; got 0"):
        hg.concrete_dropout(KEY, jnp.ones(2), 0.5, 0)
    with pytest.raises(TypeError, match=r"`x` must be an array of floats; got int32\[2\]"):
        hg.concrete_dropout(KEY, jnp.ones(2, jnp.int32), 0.5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_and_large_rates_hold_in_16_bits(dtype: Any) -> None:
    x = jnp.ones(200_000, dtype)
    kept = hg.concrete_dropout(jax.random.key(0), x, 0.005, temperature=0.01)
    assert kept.dtype == dtype
    np.testing.assert_allclose(jnp.mean(kept.astype(jnp.float32) < 0.5), 0.005, rtol=0.1)
    assert jnp.isfinite(hg.concrete_dropout(jax.random.key(0), x, 0.999)).all()


@pytest.mark.parametrize(
    "rate", [hg.unit_interval(0.5), hg.PerStep(jnp.full(3, 0.5)), hg.knots(jnp.full(2, 0.5), 3)], ids=str
)
def test_a_rate_is_a_number(rate: Any) -> None:
    with pytest.raises(TypeError, match=r"`rate` is .*which is no number\. A loss reads what hg\.natural\(hypers\) gives"):
        hg.concrete_dropout(KEY, jnp.ones(3), rate)


def test_it_takes_one_key_and_floats() -> None:
    x = jnp.ones(3)
    for arguments, text in (((0, x, 0.5), "must be a JAX key"), ((KEY, {"a": x}, 0.5), "`x` must be an array of floats")):
        with pytest.raises(TypeError, match=text):
            hg.concrete_dropout(*arguments)
    with pytest.raises(ValueError, match="must be one key"):
        hg.concrete_dropout(jax.random.split(KEY, 3), x, 0.5)


def test_each_entry_has_noise_of_its_own_where_rates_have_more_axes() -> None:
    found = hg.concrete_dropout(jax.random.key(0), jnp.ones(50), jnp.full((3, 1), 0.3))
    assert found.shape == (3, 50) and len({row.tobytes() for row in np.asarray(found)}) == 3
