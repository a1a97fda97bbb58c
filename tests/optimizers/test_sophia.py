"""Sophia: the published rule, backwards, with exact hypergradients, for losses with rules of their own too."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from classifier import batches, loss, on_grid, params
from covering import long, some_of

import hypergrad as hg
from hypergrad.curvature import quantities


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


Diagonal = Callable[[Any, Any, jax.Array], Any]


def by_signs(p: Any, batch: Any, key: jax.Array) -> Any:
    """From the whole Hessian, where the rule has products alone."""
    keys = jax.random.split(key, len(p))
    signs = [jax.random.rademacher(k, x.shape, x.dtype) for k, x in zip(keys, jax.tree.leaves(p), strict=True)]
    u, back = jax.flatten_util.ravel_pytree(jax.tree.unflatten(jax.tree.structure(p), signs))
    flat, _ = jax.flatten_util.ravel_pytree(p)
    return back(u * (jax.hessian(lambda w: loss(back(w), None, batch))(flat) @ u))


def by_labels(p: Any, batch: Any, key: jax.Array) -> Any:
    return quantities(loss, p, None, batch, "ggn_diagonal_mc", key=key)["ggn_diagonal_mc"]


@pytest.mark.parametrize(("rule", "diagonal", "gamma"), [(hg.Sophia, by_signs, 0.01), long(hg.SophiaG, by_labels, 0.05)])
def test_it_is_the_published_rule(rule: Any, diagonal: Diagonal, gamma: float) -> None:
    rate, decay, b1, b2, steps = 2.0**-7, 2.0**-3, on_grid(0.96), on_grid(0.9), 60
    data = batches(jnp.float64)
    optimizer = rule(rate, b1, b2, weight_decay=decay)
    run = hg.train(loss, params(jnp.float64), optimizer, data, steps=steps)

    @jax.jit
    def step(t: Any, p: Any, m: Any, c: Any) -> Any:
        batch = data(t)
        g = jax.grad(loss)(p, None, batch)
        e = diagonal(p, batch, jax.random.fold_in(jax.random.key(0), t))
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, g)
        c = jax.tree.map(lambda c, e: b2 * c + (1 - b2) * e, c, e)
        change = jax.tree.map(lambda m, c: jnp.clip(m / jnp.maximum(gamma * c, 1e-12), -1, 1), m, c)
        return jax.tree.map(lambda w, u: (1 - rate * decay) * w - rate * u, p, change), m, c

    p, m, c = params(jnp.float64), *[jax.tree.map(jnp.zeros_like, params(jnp.float64)) for _ in range(2)]
    for t in range(steps):
        p, m, c = step(t, p, m, c)
    clipped = jnp.mean(jnp.concatenate([jnp.ravel(abs(m[k]) > gamma * jnp.maximum(c[k], 0)) for k in p]))
    assert 0.05 < clipped < 0.95, "one of the two ways is not taken"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), run.params, p)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8), run.state["curvature"], c)


@pytest.mark.long
@some_of("rule", [hg.Sophia, hg.SophiaG], hg.Sophia)
def test_hypergradients_agree_on_three_roads(rule: Any) -> None:
    data = batches(jnp.float64)

    def end(h: Any, adjoint: Any) -> jax.Array:
        run = hg.train(loss, params(jnp.float64), rule(**h), data, steps=12, adjoint=adjoint)
        return loss(run.params, None, data(0)) + jnp.sum(run.state["curvature"]["b1"])

    # An eps at which no entry changes sides between the two ends of a difference.
    h = {"learning_rate": 2.0**-7, "b1": 0.875, "b2": 1 - 2.0**-4, "gamma": 1.0, "eps": 2.0**-3, "weight_decay": 2.0**-3}
    found, unrolled = (jax.jit(jax.grad(lambda h, a=a: end(h, a)))(h) for a in (hg.Reversible(), hg.Unrolled()))
    forward = jax.jit(lambda h: end(h, hg.Reversible()))
    for name in h:
        assert abs(found[name] - unrolled[name]) < 1e-8 * (1 + abs(unrolled[name])), name
        size = 2.0**-16  # on the grids of decays
        slope = (forward({**h, name: h[name] + size}) - forward({**h, name: h[name] - size})) / (2 * size)
        assert abs(found[name] - slope) < 1e-6 * (1 + abs(slope)), name


@pytest.mark.long
@some_of("rule", [hg.Sophia, hg.SophiaG], hg.SophiaG)
def test_it_comes_back(rule: Any) -> None:
    found = hg.check_reversal(loss, params(), rule(1e-2), batches(), steps=500)
    assert found.exact
    assert abs(found.bits_per_parameter_step / -np.log2(on_grid(0.96) * on_grid(0.999)) - 1) < 0.05


@pytest.mark.long
def test_it_keeps_the_contract() -> None:
    hg.testing.check_optimizer(hg.Sophia(0.05, gamma=1.0))


@pytest.mark.long
def test_under_vmap() -> None:
    data = batches(jnp.float64)

    def end(rate: jax.Array) -> jax.Array:
        return loss(hg.train(loss, params(jnp.float64), hg.Sophia(rate), data, steps=8).params, None, data(0))

    rates, one = jnp.asarray([0.01, 0.02]), jax.jit(jax.grad(end))
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(end)))(rates), [one(rate) for rate in rates], rtol=1e-8)


@pytest.mark.long
def test_two_estimates_in_one_partition() -> None:
    rule = hg.partition({"w": hg.Sophia(0.01), "b": hg.SophiaG(0.01)}, {"w1": "w", "w2": "w", "b1": "b", "b2": "b"})
    run = hg.train(loss, params(jnp.float64), rule, batches(jnp.float64), steps=3)
    alone = [hg.train(loss, params(jnp.float64), one, batches(jnp.float64), steps=1) for one in rule.rules.values()]
    first = hg.train(loss, params(jnp.float64), rule, batches(jnp.float64), steps=1)
    for name in ("w1", "b1"):
        np.testing.assert_array_equal(first.params[name], alone["wb".index(name[0])].params[name])
    assert bool(run.status.ok)


@jax.custom_vjp
def reversed_gradient(x: jax.Array) -> jax.Array:
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))


@pytest.mark.long
def test_a_loss_with_a_backward_rule_of_its_own() -> None:
    data = batches(jnp.float64)

    def odd(p: Any, theta: Any, batch: Any) -> jax.Array:
        return loss({**p, "w1": reversed_gradient(p["w1"])}, theta, batch)

    def end(rate: jax.Array, adjoint: Any) -> jax.Array:
        optimizer = hg.Sophia(rate, gamma=1.0, eps=1e-3)
        return loss(hg.train(odd, params(jnp.float64), optimizer, data, steps=8, adjoint=adjoint).params, None, data(0))

    found, unrolled = (
        jax.jit(jax.grad(end), static_argnums=1)(jnp.asarray(0.01), adjoint) for adjoint in (hg.Reversible(), hg.Unrolled())
    )
    assert abs(found - unrolled) < 1e-8 * abs(unrolled)
