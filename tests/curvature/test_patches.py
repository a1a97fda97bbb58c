"""What a convolution's window sees, by slices, is what XLA's own convolution makes of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from covering import some_of

import hypergrad as hg
from hypergrad.curvature import quantities


GEOMETRIES: dict[str, dict[str, Any]] = {
    "a sequence": {"window": (3,), "size": (9,), "window_strides": (2,), "padding": "SAME"},
    "strides": {"window": (3, 2), "size": (8, 7), "window_strides": (2, 3), "padding": "VALID"},
    "a window apart": {"window": (2, 3), "size": (9, 8), "padding": ((1, 2), (0, 1)), "rhs_dilation": (3, 2)},
    "an image apart": {"window": (3, 3), "size": (4, 5), "padding": ((2, 2), (1, 2)), "lhs_dilation": (2, 3)},
    "negative padding": {"window": (2, 2), "size": (7, 6), "padding": ((-1, 0), (2, -2)), "lhs_dilation": (1, 2)},
    "all of it": {
        "window": (2, 3), "size": (9, 8), "window_strides": (2, 1), "padding": ((-1, 3), (2, 2)),
        "lhs_dilation": (2, 1), "rhs_dilation": (3, 2), "feature_group_count": 2,
    },
    "volumes in groups": {"window": (2, 1, 2), "size": (3, 4, 3), "padding": "SAME", "feature_group_count": 2},
    "nothing to see": {"window": (1, 1), "size": (3, 3), "window_strides": (2, 2), "padding": "SAME"},
}  # fmt: skip


@some_of("name", GEOMETRIES, "strides", "negative padding", "all of it")
def test_gradients_of_examples_are_those_of_convolutions_of_any_geometry(name: str) -> None:
    options = {"window_strides": (1,) * len(GEOMETRIES[name]["window"]), **GEOMETRIES[name]}
    window, size, groups = options.pop("window"), options.pop("size"), options.get("feature_group_count", 1)
    rng = np.random.default_rng(0)

    def loss(kernel: Any, theta: Any, batch: Any) -> Any:
        y = jax.lax.conv_general_dilated(batch, kernel, **options)
        return jnp.mean(jnp.sum(jnp.tanh(y), tuple(range(1, y.ndim))))

    with jax.enable_x64(True):
        kernel = jnp.asarray(rng.standard_normal((6, 4 // groups, *window)))
        x = jnp.asarray(rng.standard_normal((3, 4, *size)))
        assert [use.kind for use in hg.curvature.layers(loss, kernel, None, x)] == ["convolution"]
        found = jax.jit(lambda w, x: hg.curvature.quantities(loss, w, None, x, "individual_gradients"))(kernel, x)
        expected = jax.jit(jax.vmap(lambda x: jax.grad(loss)(kernel, None, x[None]) / 3))(x)
        np.testing.assert_allclose(found["individual_gradients"], expected, rtol=1e-12, atol=1e-12)
        assert float(jnp.abs(expected).max()) > 1e-3


def frames(params: Any, x: Any, kernel: Any) -> jax.Array:
    z = jax.lax.conv_general_dilated(x, kernel, (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"))
    return jnp.tanh(z).mean(1) @ params["v"]


MANY_ROWS = {
    "frames": lambda p, x: frames(p, x.reshape(-1, *x.shape[2:]), p["k"]).reshape(*x.shape[:2], -1),
    "a map over examples": lambda p, x: jax.vmap(lambda x: frames(p, x, p["k"]))(x),
    "twins": lambda p, x: jnp.concatenate(jnp.split(frames(p, jnp.concatenate([x[:, 0], x[:, 1]]), p["k"]), 2), 1)[:, None],
}


@some_of("name", MANY_ROWS, "frames")
def test_an_example_may_be_several_rows_of_a_convolution(name: str) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    x, k, v = (jax.random.normal(key, s) for key, s in zip(keys, ((4, 3, 5, 2), (3, 2, 3), (3, 2)), strict=False))
    params = {"k": k, "v": v}
    like = jax.eval_shape(MANY_ROWS[name], params, x)
    batch = x, jax.random.normal(keys[3], like.shape)
    loss = jax.jit(lambda p, _, b: jnp.mean((MANY_ROWS[name](p, b[0]) - b[1]) ** 2))
    found = quantities(loss, params, None, batch, ["individual_gradients", "second_moment"])
    one = jax.jit(jax.vmap(lambda b: jax.grad(loss)(params, None, jax.tree.map(lambda a: a[None], b))))
    each = one(batch)
    for name in params:
        np.testing.assert_allclose(found["individual_gradients"][name], each[name] / 4, atol=1e-6)
        np.testing.assert_allclose(found["second_moment"][name], jnp.mean(each[name] ** 2, 0), atol=1e-6)
