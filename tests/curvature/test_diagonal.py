"""Steps divided by curvature: reversible, differentiated exactly, and those of BackPACK's equation."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from networks import Network, convolution, dense

import hypergrad as hg
from hypergrad.curvature import quantities


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


HYPERS = {"learning_rate": 0.3, "damping": 0.05, "momentum": 0.75, "decay": 0.6, "l2": 0.01}


def end(h: Any, rule: Any, net: Network, adjoint: Any, steps: int = 8) -> Any:
    run = hg.train(net.loss, net.params, rule(**h), hg.full_batch(net.batch), steps=steps, adjoint=adjoint)
    return net.end(net.model(run.params, net.batch), net.batch) + 0.1 * jnp.sum(run.state["curvature"]["b"])


def slopes(rule: Any, net: Network, adjoint: Any) -> tuple[dict[str, jax.Array], Any]:
    h = {k: jnp.asarray(x) for k, x in HYPERS.items()}
    return h, jax.jit(jax.grad(lambda h: end(h, rule, net, adjoint)))(h)


@pytest.mark.long
@pytest.mark.parametrize(("rule", "network"), [(hg.DiagonalGGN, dense), long(hg.DiagonalGGNMC, convolution)])
def test_hypergradients_are_those_of_the_unrolled_run(rule: Any, network: Any) -> None:
    (h, found), (_, unrolled) = (slopes(rule, network(), adjoint) for adjoint in (hg.Reversible(), hg.Unrolled()))
    for name in h:
        assert abs(float(found[name] - unrolled[name])) < 1e-8 * (1 + abs(float(unrolled[name]))), name


@pytest.mark.long
def test_hypergradients_are_differences() -> None:
    net = dense()  # differences of a network with kinks say nothing
    h, found = slopes(hg.DiagonalGGN, net, hg.Reversible())
    forward = jax.jit(lambda h: end(h, hg.DiagonalGGN, net, hg.Reversible()))
    for name in ("learning_rate", "damping", "l2"):  # decays move by multiples of 2^-16
        size = 1e-5
        moved = [float(forward({**h, name: h[name] + s * size})) for s in (1, -1)]
        assert abs(float(found[name]) - (moved[0] - moved[1]) / (2 * size)) < 1e-6 * (1 + abs(float(found[name]))), name


@some_of("rule", [hg.DiagonalGGN, hg.DiagonalGGNMC])
def test_it_comes_back(rule: Any) -> None:
    net = dense()
    found = hg.check_reversal(net.loss, net.params, rule(0.1), hg.full_batch(net.batch), steps=300)
    assert found.exact
    assert abs(found.bits_per_parameter_step / (2 * np.log2(1 / 0.9)) - 1) < 0.05


@pytest.mark.long
def test_without_average_it_is_the_published_rule() -> None:
    net, least, rate, damping = dense(), 2.0**-16, 0.1, 0.05
    run = hg.train(net.loss, net.params, hg.DiagonalGGN(rate, damping, least, least), hg.full_batch(net.batch), steps=20)
    params: Any = net.params
    for _ in range(20):
        g = jax.grad(net.loss)(params, None, net.batch)
        curvature = quantities(net.loss, params, None, net.batch, "ggn_diagonal")["ggn_diagonal"]
        params = jax.tree.map(lambda w, g, c: w - rate * g / (c + damping), params, g, curvature)
    for a, b in zip(jax.tree.leaves(run.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


@pytest.mark.long
def test_under_vmap() -> None:
    net = dense()
    rates = jnp.asarray([0.1, 0.2])
    one = lambda rate: end({**HYPERS, "learning_rate": rate}, hg.DiagonalGGN, net, hg.Reversible())  # noqa: E731
    both = jax.jit(jax.vmap(jax.grad(one)))(rates)
    np.testing.assert_allclose(both, [jax.jit(jax.grad(one))(rate) for rate in rates], rtol=1e-8)
