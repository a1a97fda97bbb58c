"""Rules that see examples, and losses that are no mean over them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import long, some_of
from tiny import fails

import hypergrad as hg


X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
DATA = X, np.sin(X.sum(axis=1))
PARAMS = {"a": np.full((3, 2), 0.3, np.float32), "b": np.full((2, 1), 0.5, np.float32)}
RULES: dict[str, Any] = {
    "KFAC": hg.KFAC(0.01),
    "KFLR": hg.KFLR(0.01),
    "DiagonalGGN": hg.DiagonalGGN(0.01),
    "SophiaG": hg.SophiaG(0.01),
    "clipped": hg.clip(hg.DiagonalGGN(0.01), 1.0),
    "beside another": hg.partition({"a": hg.KFLR(0.01), "b": hg.SGD(0.01)}, {"a": "a", "b": "b"}),
}


def summed(w: Any, scale: Any, batch: Any) -> jax.Array:
    x, y = batch
    return scale * jnp.sum(optax.l2_loss((jnp.tanh(x @ w["a"]) @ w["b"])[:, 0], y))


def normalized(w: Any, scale: Any, batch: Any) -> jax.Array:
    x, y = batch
    h = x @ w["a"]
    h = (h - h.mean(axis=0)) * jax.lax.rsqrt(h.var(axis=0) + 1e-3)
    return scale * jnp.mean(optax.l2_loss((jnp.tanh(h) @ w["b"])[:, 0], y))


def mean(w: Any, scale: Any, batch: Any) -> jax.Array:
    x, y = batch
    return scale * jnp.mean(optax.l2_loss((jnp.tanh(x @ w["a"]) @ w["b"])[:, 0], y))


def trained(loss: Any, rule: Any) -> hg.Trained:
    batches = hg.minibatches(DATA, batch_size=4, key=jax.random.key(0))
    return hg.train(loss, PARAMS, rule, batches, theta=hg.PerStep(jnp.ones(3)), steps=3)


@some_of(("name", "loss"), [(n, f) for n in RULES for f in (summed, normalized)], ("KFLR", normalized), ("clipped", summed))
def test_a_loss_that_is_no_mean_over_examples_has_no_curvature_of_them(name: str, loss: Any) -> None:
    with fails(ValueError, "`loss` is no mean over the examples of `batch`"):
        trained(loss, RULES[name])


@some_of("name", RULES, "beside another")
def test_a_mean_trains(name: str) -> None:
    assert np.isfinite(trained(mean, RULES[name]).losses).all()


@pytest.mark.parametrize("rule", [hg.Sophia(0.01), long(hg.SGD(0.01))], ids=["Sophia", "SGD"])
def test_rules_that_see_no_examples_train_by_any_loss(rule: Any) -> None:
    assert np.isfinite(trained(normalized, rule).losses).all()
