"""`hg.train` composes: eager, jit, vmap; float32, float64, bfloat16; x64 on and off; any tree of parameters."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import network

import hypergrad as hg


STEPS = 10
NETWORK = network("tanh")


def trained(rate, key, dtype=jnp.float32, **options):
    batches = hg.minibatches(NETWORK.data, 8, key)
    sgd = hg.SGD(hg.PerStep(rate), 0.8)
    return hg.train(NETWORK.loss, NETWORK.params(dtype), sgd, batches, theta=NETWORK.theta(dtype), steps=STEPS, **options)


def value(rate, key, dtype=jnp.float32):
    return NETWORK.value(trained(rate, key, dtype).params)


RATE = jnp.linspace(0.1, 0.3, STEPS)
KEYS = jax.random.split(jax.random.key(3), 3)


def test_eager_jit_and_vmap_over_keys_agree():
    gradient = jax.grad(value)
    lanes = jax.jit(jax.vmap(gradient, (None, 0)))(RATE, KEYS)
    eager_lanes = jax.vmap(gradient, (None, 0))(RATE, KEYS)
    np.testing.assert_allclose(lanes, eager_lanes, rtol=1e-4, atol=1e-7)
    compiled = jax.jit(gradient)
    for lane, key in zip(lanes, KEYS, strict=True):
        np.testing.assert_allclose(lane, compiled(RATE, key), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(lanes[0], gradient(RATE, KEYS[0]), rtol=1e-4, atol=1e-7)


def test_vmap_over_hyperparameters_even_over_the_momentum():
    def f(rate, momentum):
        run = hg.train(
            NETWORK.loss, NETWORK.params(), hg.SGD(rate, momentum), hg.full_batch(NETWORK.data),
            theta=NETWORK.theta(), steps=STEPS,
        )  # fmt: skip
        return NETWORK.value(run.params)

    gradient = jax.grad(f, argnums=(0, 1))
    rates, momenta = jnp.array([0.1, 0.3]), jnp.array([0.7, 0.9])
    lanes = jax.jit(jax.vmap(gradient))(rates, momenta)
    for i in range(2):
        np.testing.assert_allclose([g[i] for g in lanes], jax.jit(gradient)(rates[i], momenta[i]), rtol=1e-4)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16])
def test_the_users_dtypes_stay_the_users(x64, dtype):
    if dtype == jnp.float64 and not x64:
        return  # float64 arrays exist under x64 only
    with jax.enable_x64(x64):
        run = trained(RATE, KEYS[0], dtype)
        assert {x.dtype for x in jax.tree.leaves(run.params)} == {jnp.dtype(dtype)}
        assert not any(x.dtype in (jnp.int64, jnp.uint64) for x in jax.tree.leaves(run))
        gradient = jax.grad(lambda r: value(r, KEYS[0], dtype).astype(jnp.float32))(RATE)
        assert gradient.dtype == RATE.dtype and bool(jnp.all(jnp.isfinite(gradient)))


@pytest.mark.parametrize("x64", [False, True])
def test_the_loss_runs_under_the_callers_setting(x64):
    seen = []

    def loss(w, _, batch):
        seen.append(jnp.zeros(()).dtype)
        return jnp.sum((w - batch) ** 2)

    with jax.enable_x64(x64):
        f = lambda w: hg.train(loss, w, hg.SGD(0.1), hg.full_batch(jnp.ones(2, w.dtype)), steps=2).params.sum()  # noqa: E731
        jax.jit(jax.grad(f))(jnp.zeros(2))
    assert set(seen) == {jnp.dtype(jnp.float64 if x64 else jnp.float32)}


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize(
    "params",
    [jnp.float32(2.0), 2.0, [jnp.ones(3)], Pair(jnp.ones(2), {"x": jnp.ones(()), "none": None}), np.ones(2, np.float32)],
)
def test_any_tree_of_parameters(params):
    def loss(w, _, batch):
        return sum(jnp.sum((x - batch) ** 2) for x in jax.tree.leaves(w))

    def f(w):
        run = hg.train(loss, w, hg.SGD(0.1), hg.full_batch(jnp.float32(1.5)), steps=1)
        return loss(run.params, None, jnp.float32(0.0)) + run.losses.sum()

    gradient = jax.grad(f)(jax.tree.map(jnp.asarray, params))
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    # One step of SGD on (w - 1.5)^2: w' = w - 0.1 (1 - m) 2 (w - 1.5), so f' = 2 w' (1 - 0.2 (1 - m)) + 2 (w - 1.5).
    decay = 1 - round(0.9 * 2**16) / 2**16
    for g, w in zip(jax.tree.leaves(gradient), jax.tree.leaves(params), strict=True):
        after = w - 0.2 * decay * (w - 1.5)
        np.testing.assert_allclose(g, 2 * after * (1 - 0.2 * decay) + 2 * (w - 1.5), rtol=1e-5)


def test_an_equinox_model_partitioned():
    model = eqx.nn.MLP(6, 3, 4, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    x, y = (jnp.asarray(a) for a in NETWORK.data)

    def loss(params, _, batch):
        logits = jax.vmap(eqx.combine(params, static))(batch[0])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch[1][:, None], 1))

    def f(rate):
        return loss(hg.train(loss, params, hg.SGD(rate), hg.full_batch((x, y)), steps=5).params, None, (x, y))

    value, gradient = jax.value_and_grad(f)(0.5)
    assert value < loss(params, None, (x, y)) and gradient < 0


def test_state_continues_a_run():
    data = hg.full_batch(NETWORK.data)
    run = lambda params, steps, state=None: hg.train(  # noqa: E731
        NETWORK.loss, params, hg.SGD(0.2), data, theta=NETWORK.theta(), steps=steps, state=state
    )
    whole, half = run(NETWORK.params(), 20), run(NETWORK.params(), 10)
    rest = run(half.params, 10, half.state)
    for x, y in zip(jax.tree.leaves(rest.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
