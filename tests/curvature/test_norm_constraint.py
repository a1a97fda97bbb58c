"""Preconditioned steps of bounded length: one factor for all leaves, made of what their factors have come to."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of
from networks import dense

import hypergrad as hg


HYPERS = {"learning_rate": 0.3, "damping": 0.05, "momentum": 0.75, "decay": 0.6, "l2": 0.01, "max_norm": 0.02}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def bounded(h: Any, every: int = 1) -> Any:
    rule = {name: x for name, x in h.items() if name != "max_norm"}
    return hg.norm_constraint(hg.KFLR(**rule, every=every), h["max_norm"])


def clipped(h: Any) -> Any:
    return hg.clip_by_global_norm(bounded(h, every=2), 0.5)


@pytest.mark.long
@some_of("make", [bounded, clipped], clipped)
def test_hypergradients_agree_on_three_roads(make: Any) -> None:
    net, h = dense(), {name: jnp.asarray(x) for name, x in HYPERS.items()}

    def end(h: Any, adjoint: Any) -> Any:
        run = hg.train(net.loss, net.params, make(h), hg.full_batch(net.batch), steps=6, adjoint=adjoint)
        return net.end(net.model(run.params, net.batch), net.batch) + 0.1 * jnp.sum(run.state["factors"]["b"])

    found, unrolled = (
        jax.jit(jax.grad(lambda h, a=a: end(h, a)))(h) for a in (hg.Reversible(), hg.Unrolled())
    )  # fmt: skip
    forward = jax.jit(lambda h: end(h, hg.Reversible()))
    for one in h:
        assert abs(float(found[one] - unrolled[one])) < 1e-8 * (1 + abs(float(unrolled[one]))), one
        assert abs(float(found[one])) > 1e-9 or one == "learning_rate", one  # a bounded step has its length from the bound
    for one in ("max_norm", "damping", "l2"):
        moved = [float(forward({**h, one: h[one] + sign * 1e-5})) for sign in (1, -1)]
        assert abs(float(found[one]) - (moved[0] - moved[1]) / 2e-5) < 1e-6 * (1 + abs(float(found[one]))), one


def test_it_is_the_published_rule() -> None:
    """One factor min(1, c / n) for all leaves, from the inverse factors of the step."""
    net, rate, damping, l2, bound, least = dense(), 0.3, 0.05, 0.01, 0.03, 2.0**-16
    rule = hg.norm_constraint(hg.KFLR(rate, damping, least, least, l2), bound)
    run = hg.train(net.loss, net.params, rule, hg.full_batch(net.batch), steps=5)
    params, factors, gradient = net.params, [], jax.jit(jax.grad(net.loss))
    free, batch = hg.KFLR(1.0, damping, least, least, l2), hg.full_batch(net.batch)
    step = jax.jit(lambda params: hg.train(net.loss, params, free, batch, steps=1).params)
    for _ in range(5):
        divided = jax.tree.map(jnp.subtract, params, step(params))
        g = jax.tree.map(lambda g, w: g + l2 * w, gradient(params, None, net.batch), params)
        square = sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(divided), jax.tree.leaves(g), strict=True))
        factors.append(min(1.0, bound / float(rate * jnp.sqrt(square))))
        params = jax.tree.map(lambda w, p, f=factors[-1]: w - f * rate * p, params, divided)
    assert max(factors) < 1
    for name, w in params.items():
        np.testing.assert_allclose(run.params[name], w, atol=1e-4)


@pytest.mark.long
def test_where_it_does_not_bind_nothing_changes() -> None:
    net = dense()
    free, loose = (
        hg.train(net.loss, net.params, rule, hg.full_batch(net.batch), steps=8).params
        for rule in (hg.KFLR(0.05), hg.norm_constraint(hg.KFLR(0.05), 1e6))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), free, loose)


@pytest.mark.long
@some_of("every", [1, 4], 4)
def test_it_comes_back(every: int) -> None:
    net = dense()
    rule = hg.norm_constraint(hg.KFAC(0.3, every=every), 0.01)
    assert hg.check_reversal(net.loss, net.params, rule, hg.full_batch(net.batch), steps=60).exact


@pytest.mark.long
def test_beside_another_rule_and_under_vmap() -> None:
    net = dense()
    labels = {name: "rest" if name == "v" else "layers" for name in net.params}

    def end(bound: Any, adjoint: Any) -> Any:
        rules = {"layers": hg.norm_constraint(hg.KFLR(0.5, every=2), bound), "rest": hg.clip(hg.SGD(0.05), 1.0)}
        run = hg.train(
            net.loss, net.params, hg.partition(rules, labels), hg.full_batch(net.batch), steps=4, adjoint=adjoint
        )  # fmt: skip
        return net.loss(run.params, None, net.batch)

    found, unrolled = (
        jax.jit(jax.vmap(jax.grad(lambda b, a=a: end(b, a))))(jnp.asarray([0.003, 0.01]))
        for a in (hg.Reversible(), hg.Unrolled())
    )
    np.testing.assert_allclose(found, unrolled, rtol=1e-8)
    assert float(jnp.abs(found).min()) > 1e-6


@pytest.mark.long
def test_what_it_cannot_bound() -> None:
    with pytest.raises(TypeError, match="bounds the steps of hg.KFAC, .* Got SGD; hg.clip_by_global_norm"):
        hg.norm_constraint(hg.SGD(0.1), 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hg.norm_constraint: `max_norm` must be at least 0; got -1.0"):
        hg.norm_constraint(hg.KFAC(0.1), -1.0)
    net = dense()
    train = lambda c: hg.train(  # noqa: E731
        net.loss, net.params, hg.norm_constraint(hg.KFLR(0.1), c), hg.full_batch(net.batch), steps=2, throw=False
    )
    assert "became NaN or infinite at step 0" in str(jax.jit(train)(-1.0).status.error())


@pytest.mark.parametrize("rule", [hg.DiagonalGGN(0.1), hg.KFAC(0.1, every=2), hg.norm_constraint(hg.KFLR(0.1), 1.0)])
def test_the_checker_of_optimizers_says_that_it_has_no_examples(rule: Any) -> None:
    with pytest.raises(TypeError, match="check_optimizer has a loss without examples, .* hg.check_reversal says"):
        hg.testing.check_optimizer(rule)


class Blend(hg.optimizers.Transformed):
    """A user's own: the gradient pulled towards the mean that the link before has come to, of all leaves alike."""

    share: Any
    reads = ("mean",)

    @staticmethod
    def transform(h: Any, w: Any, g: Any, z: Any) -> Any:
        scale = sum(jnp.sum(zj.mean**2) for zj in z)
        return [x + hj.share * jnp.tanh(scale) * hj.pull * zj.mean for hj, x, zj in zip(h, g, z, strict=True)]


class Mean(hg.optimizers.Optimizer):
    """A first link that sees the gradient itself; `pull` is for the transformation alone."""

    learning_rate: Any
    b: Any = 0.75
    momentum: Any = 0.5
    pull: Any = 1.0

    chain = (
        hg.optimizers.Link("mean", lambda h, z, g: (1 - h.b) * g, decay="b"),
        hg.optimizers.Link("velocity", lambda h, z, g: -g * (1 + z.mean**2), decay="momentum"),
        hg.optimizers.Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


@pytest.mark.long
def test_a_transformation_of_ones_own_reads_links_that_see_the_gradient_as_it_is() -> None:
    net = dense()
    rule = hg.clip(Blend(Mean(jnp.asarray(0.05)), jnp.asarray(0.7)), jnp.asarray(10.0))
    assert hg.check_reversal(net.loss, net.params, rule, hg.full_batch(net.batch), steps=30).exact

    def end(rule: Any, params: Any, adjoint: Any) -> Any:
        run = hg.train(net.loss, params, rule, hg.full_batch(net.batch), steps=6, adjoint=adjoint)
        return net.loss(run.params, None, net.batch)

    found, unrolled = (
        jax.jit(jax.grad(lambda *x, a=a: end(*x, a), argnums=(0, 1)))(rule, net.params)
        for a in (hg.Reversible(), hg.Unrolled())
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12), found, unrolled)
    assert abs(float(found[0].inner.share)) > 1e-4
    with pytest.raises(TypeError, match=r"Blend reads links that the optimizer inside does not have: mean. Is each spelt"):
        hg.train(net.loss, net.params, Blend(hg.SGD(0.1), 0.5), hg.full_batch(net.batch), steps=1)
