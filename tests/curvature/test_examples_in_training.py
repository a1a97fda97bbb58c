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
from hypergrad import _examples


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


def trained(loss: Any, rule: Any, seed: Any = 0, params: Any = PARAMS, data: Any = DATA, scale: Any = 1.0) -> hg.Trained:
    batches = hg.minibatches(data, batch_size=4, key=jax.random.key(seed))
    return hg.train(loss, params, rule, batches, theta=hg.PerStep(scale * jnp.ones(3)), steps=3)


@some_of(("name", "loss"), [(n, f) for n in RULES for f in (summed, normalized)], ("KFLR", normalized), ("clipped", summed))
def test_a_loss_that_is_no_mean_over_examples_has_no_curvature_of_them(name: str, loss: Any) -> None:
    with fails(ValueError, "`loss` is no mean over the examples of `batch`"):
        trained(loss, RULES[name])


@some_of("name", RULES, "beside another")
def test_a_mean_trains(name: str) -> None:
    assert np.isfinite(trained(mean, RULES[name]).losses).all()


@some_of("name", RULES, "DiagonalGGN")
def test_it_is_asked_of_what_is_known_in_a_program_that_is_being_built(name: str) -> None:
    params, data = jax.tree.map(jnp.asarray, (PARAMS, DATA))
    batches = hg.minibatches(data, batch_size=4, key=jax.random.key(0))

    def losses(loss: Any) -> Any:
        return jax.jit(lambda: hg.train(lambda w, _, b: loss(w, 1, b), params, RULES[name], batches, steps=3).losses)()

    assert np.isfinite(losses(mean)).all()
    with fails(ValueError, "`loss` is no mean over the examples of `batch`"):
        losses(summed)


@pytest.mark.parametrize("rule", [hg.Sophia(0.01), long(hg.SGD(0.01))], ids=["Sophia", "SGD"])
def test_rules_that_see_no_examples_train_by_any_loss(rule: Any) -> None:
    assert np.isfinite(trained(normalized, rule).losses).all()


def of_rate(loss: Any, rate: Any) -> Any:
    return trained(loss, hg.KFLR(rate)).losses


def of_seed(loss: Any, seed: Any) -> Any:
    return trained(loss, RULES["KFLR"], seed=seed.astype(int)).losses


def of_params(loss: Any, scale: Any) -> Any:
    return trained(loss, RULES["KFLR"], params=jax.tree.map(lambda w: scale * w, PARAMS)).losses


def of_inputs(loss: Any, scale: Any) -> Any:
    return trained(loss, RULES["KFLR"], data=(scale * DATA[0], DATA[1])).losses


def of_theta(loss: Any, scale: Any) -> Any:
    return trained(loss, RULES["KFLR"], scale=scale).losses


def of_what_is_closed_over(loss: Any, scale: Any) -> Any:
    return trained(lambda w, _, batch: loss(w, scale, batch), RULES["KFLR"]).losses


TRACED: dict[str, Any] = {f.__name__: f for f in (of_rate, of_seed, of_params, of_inputs, of_theta, of_what_is_closed_over)}


@some_of(
    ("name", "loss"), [(n, f) for n in TRACED for f in (summed, normalized)], ("of_rate", summed), ("of_seed", normalized)
)
def test_it_is_found_where_values_are_traced(name: str, loss: Any) -> None:
    with fails(ValueError, "`loss` is no mean over the examples of `batch`: with numbers made up for those that are traced"):
        jax.make_jaxpr(lambda x: TRACED[name](loss, x))(0.5)


@some_of("name", TRACED, "of_what_is_closed_over")
def test_a_mean_of_traced_values_is_none_to_refuse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was computed: what cannot be is let pass, too."""
    told, ask = [], _examples.no_mean
    monkeypatch.setattr(_examples, "no_mean", lambda *args: told.append(ask(*args)))
    factor = 3.0 + list(TRACED).index(name)  # a program that nobody has asked about
    jax.make_jaxpr(lambda x: TRACED[name](lambda w, scale, batch: factor * mean(w, scale, batch), x))(0.5)
    assert told == [None]


def test_labels_that_are_traced_are_not_made_up() -> None:
    params, labels = PARAMS | {"b": np.full((2, 3), 0.5, np.float32)}, np.zeros(12, np.int32)

    def counted(w: Any, _: Any, batch: Any) -> jax.Array:
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ w["a"]) @ w["b"], y).sum()

    def of_labels(y: Any) -> Any:
        return trained(counted, RULES["KFLR"], params=params, data=(DATA[0], y)).losses

    jax.make_jaxpr(of_labels)(labels)
    with fails(ValueError, "`loss` is no mean over the examples of `batch`"):
        of_labels(labels)
