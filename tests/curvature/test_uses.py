"""Weights that are converted, repeated or without entries, and layers in groups, have the quantities of brute force."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of
from networks import Network, gradients, hessian

import hypergrad as hg
from hypergrad.curvature import Diagonal, Kronecker, layers, quantities


N = 4
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 3)), RNG.normal(size=(N, 2))
SUMS = "individual_gradients"
FIRST = ("squared_norms", "second_moment", "variance", "hessian_diagonal")


def end(f: Any, b: Any) -> Any:
    if isinstance(f, tuple):
        return end(f[0], b) + f[1]
    return jnp.mean((f - b["y"]) ** 2)


def declared(f: Any, b: Any) -> Any:
    """Of a model without a layer that has factors, nobody else knows where it ends."""
    return jnp.mean(hg.curvature.likelihood("squared_error", f, b["y"]))


def complex_(p: Any, b: Any) -> Any:
    f = jnp.fft.fft(b["x"], axis=-1) @ p["w"].astype(jnp.complex128)
    return f.real + f.imag


def counted(p: Any, b: Any) -> Any:
    return b["x"] @ p["w"] + jnp.round(b["x"][:, :2]).astype(jnp.int32) @ p["v"].astype(jnp.int32)


def registered(p: Any, b: Any) -> Any:
    """With a penalty beside it, and a term that no example has a part in."""
    f = hg.curvature.register(b["x"] @ p["w"] + p["b"], b["x"], (p["w"], p["b"]))
    return f, 0.3 * jnp.sum(p["w"] ** 2) + jnp.sum(jnp.tanh(2 * p["b"]) * p["w"][0])


def repeated(p: Any, b: Any) -> Any:
    w = jnp.broadcast_to(p["u"][:, None], (3, 2))
    return hg.curvature.register(b["x"] @ w, b["x"], w)


def ensemble(p: Any, b: Any) -> Any:
    return jax.vmap(lambda w: hg.curvature.register(b["x"] @ w, b["x"], w))(p["w"]).mean(0)


def of_none(p: Any, b: Any) -> Any:
    return b["x"] @ p["w"] + b["x"][:, :0] @ p["v"]


MODELS: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "complex": (complex_, {"w": (3, 2)}),
    "counted": (counted, {"w": (3, 2), "v": (2, 2)}),
    "registered": (registered, {"w": (3, 2), "b": (2,)}),
    "repeated": (repeated, {"u": (3,)}),
    "ensemble": (ensemble, {"w": (5, 3, 2)}),
    "no entries": (of_none, {"w": (3, 2), "v": (0, 2)}),
}


def network(name: str) -> Network:
    model, shapes = MODELS[name]
    params = {leaf: jnp.asarray(RNG.normal(size=shape)) for leaf, shape in shapes.items()}
    return Network(model, declared if name == "ensemble" else end, params, {"x": jnp.asarray(X), "y": jnp.asarray(Y)})


@some_of("name", MODELS, "registered", "complex", "no entries")
def test_squares_of_weights_that_no_layer_reads_entry_by_entry(name: str) -> None:
    with jax.enable_x64(True):
        net = network(name)
        each = gradients(net)
        found = quantities(net.loss, net.params, None, net.batch, FIRST)
        exact = {
            "squared_norms": jax.tree.map(lambda g: jnp.sum(g.reshape(N, -1) ** 2, 1) / N**2, each),
            "second_moment": jax.tree.map(lambda g: jnp.mean(g**2, 0), each),
            "variance": jax.tree.map(lambda g: jnp.var(g, 0), each),
            "hessian_diagonal": jax.flatten_util.ravel_pytree(net.params)[1](jnp.diag(hessian(net))),
        }
        sums = jax.tree.map(lambda g: g.sum(0), quantities(net.loss, net.params, None, net.batch, SUMS)[SUMS])
        exact["sums"], found["sums"] = jax.tree.map(lambda g: g.mean(0), each), sums
        for quantity, expected in exact.items():
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), found[quantity], expected)


@some_of("name", ["repeated", "ensemble", "no entries"], "repeated", "no entries")
def test_what_has_no_factors_has_its_diagonal(name: str) -> None:
    with jax.enable_x64(True):
        net = network(name)
        found = quantities(net.loss, net.params, None, net.batch, ["kflr", "ggn_diagonal"])
        leaf = "v" if "v" in net.params else next(iter(net.params))
        assert isinstance(found["kflr"][leaf], Diagonal)
        np.testing.assert_allclose(found["kflr"][leaf].values, found["ggn_diagonal"][leaf], atol=1e-12)
        np.testing.assert_allclose(  # of a linear model and a squared error
            found["ggn_diagonal"][leaf].ravel(),
            quantities(net.loss, net.params, None, net.batch, "hessian_diagonal")["hessian_diagonal"][leaf].ravel(),
            atol=1e-10,
        )


def test_the_factors_of_groups_by_averages_are_exact_in_a_last_layer() -> None:
    names = ("NHWC", "HWIO", "NHWC")

    def loss(k: Any, theta: Any, b: Any) -> Any:
        f = jax.lax.conv_general_dilated(b["x"], k, (1, 1), "VALID", dimension_numbers=names, feature_group_count=2)
        return jnp.mean((f.reshape(len(f), -1) - b["y"]) ** 2 * jnp.arange(1.0, 7.0))

    k, x, y = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((2, 2, 2, 6), (N, 2, 2, 4), (N, 6)))
    found = quantities(loss, k, None, {"x": x, "y": y}, ["kflr", "kfra"])
    assert isinstance(found["kflr"], Kronecker) and found["kflr"].b.shape == (2, 3, 3)
    np.testing.assert_allclose(found["kfra"].b, found["kflr"].b, rtol=1e-6)
    np.testing.assert_allclose(found["kfra"].a, found["kflr"].a, rtol=1e-6)


def test_squares_are_of_a_longer_type_than_half_precision() -> None:
    """Inputs of 400 have squares beyond float16, and derivatives of 1e-6 have none above its zero."""
    x, y, w = (jnp.asarray(z, jnp.float32) for z in (X, Y, RNG.normal(size=(3, 2))))

    def loss(w: Any, theta: Any, b: Any) -> Any:
        f = (b["x"].astype(jnp.float16) * 400) @ w.astype(jnp.float16)
        return 1e-3 * jnp.mean((f.astype(jnp.float32) / 400 - b["y"]) ** 2)

    found = quantities(loss, w, None, {"x": x, "y": y}, ["individual_gradients", "second_moment", "squared_norms", "kflr"])
    each = found["individual_gradients"] * N
    np.testing.assert_allclose(found["second_moment"], jnp.mean(each**2, 0), rtol=2e-2)
    np.testing.assert_allclose(found["squared_norms"], jnp.sum(each**2, (1, 2)) / N**2, rtol=2e-2)
    np.testing.assert_allclose(found["kflr"].a[0], 400**2 * x.T @ x / N, rtol=2e-2, atol=200)


@pytest.mark.parametrize("quantity", ["ggn_diagonal", "kflr"])
def test_a_loss_of_bfloat16_has_curvature(quantity: str) -> None:
    x, y, w = (jnp.asarray(z, jnp.float32) for z in (X, Y, RNG.normal(size=(3, 2))))
    loss = lambda w, theta, b: jnp.mean((b["x"] @ w - b["y"]) ** 2)  # noqa: E731
    of = lambda *xs: jax.jit(lambda w, x, y: quantities(loss, w, None, {"x": x, "y": y}, quantity))(*xs)  # noqa: E731
    short = of(*(z.astype(jnp.bfloat16) for z in (w, x, y)))
    for a, b in zip(jax.tree.leaves(short), jax.tree.leaves(of(w, x, y)), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=5e-2, atol=5e-2)


def test_a_number_among_the_parameters_is_listed() -> None:
    loss = lambda p, theta, b: jnp.mean((b["x"] @ p["w"] * p["s"] - b["y"]) ** 2)  # noqa: E731
    listed = [str(x) for x in layers(loss, {"w": jnp.ones((3, 2)), "s": 2.0}, None, {"x": X, "y": Y})]
    assert listed == ["params['s'] (): scale", "params['w'] (3, 2): dense"]
