"""BackPACK's own numbers (tests/curvature/backpack_figures.py), by the factors that docs/curvature.md has."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from covering import some_of

import hypergrad as hg


RECORDED = json.loads((pathlib.Path(__file__).parent / "backpack.json").read_text())
FACTORS: dict[str, tuple[str, Any]] = {  # ours -> theirs, and what ours are multiplied with: a function of N
    "individual_gradients": ("grad_batch", lambda n: 1),
    "squared_norms": ("batch_l2", lambda n: 1),
    "second_moment": ("sum_grad_squared", lambda n: 1 / n),
    "variance": ("variance", lambda n: 1 / n**2),
    "ggn_diagonal": ("diag_ggn_exact", lambda n: 1),
    "hessian_diagonal": ("diag_h", lambda n: 1),
}


def dense(params: Any, x: Any) -> Any:
    w, b, v, c = params
    return jnp.tanh(x @ w.T + b) @ v.T + c


def convolution(params: Any, x: Any) -> Any:
    kernel, b, v, c = params
    x = jax.lax.conv_general_dilated(x, kernel, (1, 2), ((1, 1), (1, 1)), dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return jax.nn.sigmoid(x + b[:, None, None]).reshape(len(x), -1) @ v.T + c


MODELS = {"dense": dense, "convolution": convolution}


def ours(network: str, which: Any, **options: Any) -> Any:
    def loss(params: Any, _: Any, batch: Any) -> Any:
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(MODELS[network](params, x), y).mean()

    recorded = RECORDED[network]
    params = [jnp.asarray(p, jnp.float32) for p in recorded["params"]]
    batch = jnp.asarray(recorded["x"], jnp.float32), jnp.asarray(recorded["y"])
    return jax.jit(lambda p, b: hg.curvature.quantities(loss, p, None, b, which, **options))(params, batch)


def assert_close(found: Any, expected: Any) -> None:
    expected = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(found).reshape(expected.shape), expected, atol=1e-5 * np.abs(expected).max())


@some_of("network", MODELS, "dense")
def test_quantities_of_the_shape_of_parameters(network: str) -> None:
    found = ours(network, tuple(FACTORS))
    n = len(RECORDED[network]["y"])
    for name, (theirs, factor) in FACTORS.items():
        for x, y in zip(found[name], RECORDED[network][theirs], strict=True):
            assert_close(factor(n) * x, y)


@some_of("name", ["kflr", "kfra"], "kfra")
def test_factors_of_dense_layers(name: str) -> None:
    for block, theirs in zip(ours("dense", name)[name], RECORDED["dense"][name], strict=True):
        assert_close(block.b[0], theirs[0])
        if len(theirs) > 1:
            assert_close(block.a[0], theirs[1])


def test_factors_of_a_convolution() -> None:
    """Theirs: A of all positions, added up, and B of derivatives that are added up over positions and then squared."""
    positions = 4 * 3
    expand, reduce = (ours("convolution", "kflr", sharing=sharing)["kflr"] for sharing in ("expand", "reduce"))
    kernel, bias, *layer = RECORDED["convolution"]["kflr"]
    assert_close(reduce[0].b[0], kernel[0])
    assert_close(positions * expand[0].a[0], kernel[1])
    assert_close(expand[1].b[0], bias[0])
    assert_close(expand[2].a[0], layer[0][1])
    assert_close(expand[2].b[0], layer[0][0])
