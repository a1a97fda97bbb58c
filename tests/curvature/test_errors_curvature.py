"""What bad input gets, in words."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long

import hypergrad as hg
from hypergrad.curvature import Operator, quantities
from hypergrad.curvature._means import check_mean


X, Y = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32), jnp.arange(6) % 2
W = jnp.arange(6.0).reshape(3, 2)


def loss(w: Any, theta: Any, batch: Any) -> Any:
    return jnp.mean(hg.curvature.likelihood("softmax_cross_entropy", batch[0] @ w, batch[1]))


def normalized(w: Any, theta: Any, batch: Any) -> Any:
    z = batch[0] @ w
    return jnp.mean(hg.curvature.likelihood("softmax_cross_entropy", (z - z.mean(0)) / (z.std(0) + 1), batch[1]))


def test_an_unknown_quantity() -> None:
    with pytest.raises(ValueError, match=r"`which` has 'hessian', which is none of the quantities: individual_gradients,"):
        quantities(loss, W, None, (X, Y), "hessian")


def test_labels_need_a_key() -> None:
    with pytest.raises(ValueError, match=r"'kfac' draws labels of the model: give it a `key`"):
        quantities(loss, W, None, (X, Y), ["variance", "kfac"])


def test_a_loss_that_is_no_mean() -> None:
    with pytest.raises(ValueError, match="no mean over the examples.*normalization, hold the batch's statistics fixed"):
        quantities(normalized, W, None, (X, Y), "variance")
    with pytest.raises(ValueError, match="If it takes a sum, divide by the number of examples"):
        quantities(lambda w, theta, b: jnp.sum((b[0] @ w) ** 2), W, None, (X, Y), "variance")


def test_leading_axes() -> None:
    with pytest.raises(ValueError, match=r"must have the examples as its leading axis; the leading axes are .*6.*5"):
        quantities(loss, W, None, (X, Y[:5]), "variance")


def test_a_likelihood_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"targets of shape \(6, 3\) do not fit outputs of shape \(6, 2\).* needs \(6,\)"):
        hg.curvature.likelihood("softmax_cross_entropy", X @ W, X)
    with pytest.raises(ValueError, match="`name` must be one of softmax_cross_entropy, sigmoid_cross_entropy"):
        hg.curvature.likelihood("gamma", X @ W, Y)


def test_labels_of_an_unknown_likelihood() -> None:
    of = lambda f, y: jnp.mean(jnp.logaddexp(*f.T) - f[jnp.arange(len(y)), y])  # noqa: E731
    own = lambda w, theta, b: of(b[0] @ w, b[1])  # noqa: E731
    with pytest.raises(ValueError, match="does not end in a likelihood that is known, once. Take hg.curvature.likelihood"):
        quantities(own, W, None, (X, Y), "kfac", key=jax.random.key(0))
    found = quantities(own, W, None, (X, Y), ["ggn_diagonal", "hessian_diagonal"])
    np.testing.assert_allclose(found["ggn_diagonal"], found["hessian_diagonal"], rtol=1e-4, atol=1e-7)


def test_a_model_without_layers() -> None:
    with pytest.raises(ValueError, match="'kflr' needs to know where the model ends"):
        quantities(lambda w, theta, b: jnp.mean(jnp.sin(jnp.sum(w) * b[0])), W, None, (X, Y), "kflr")


def test_kfra_needs_a_sequence() -> None:
    skip = lambda w, theta, b: jnp.mean((jnp.tanh(b[0] @ w[0]) @ w[1] + b[0] @ w[2]) ** 2)  # noqa: E731
    weights = [jnp.ones((3, 3)), jnp.ones((3, 2)), jnp.ones((3, 2))]
    with pytest.raises(ValueError, match="'kfra' passes averages from layer to layer.*Take 'kflr'"):
        quantities(skip, weights, None, (X, Y), "kfra")


def test_an_unregistered_kind() -> None:
    with pytest.raises(ValueError, match="`kind` must be one of dense, or a hg.curvature.Layer"):
        hg.curvature.register(X @ W, X, W, "lstm")
    with pytest.raises(ValueError, match=r"has a weight of shape \(3, 2\), \[in, out\]; got \(2, 3\). Give it transposed"):
        hg.curvature.register(X @ W, X, W.T)


def test_a_loss_that_is_no_mean_and_small() -> None:
    tiny = lambda w, theta, b: 1e-10 * jnp.sum((b[0] @ w) ** 2)  # noqa: E731
    with pytest.raises(ValueError, match="no mean over the examples"):
        quantities(tiny, W, None, (X, Y), "variance")


def test_rounding_near_a_minimum_is_no_sum() -> None:
    """Residuals of mere rounding differ from batch to example."""
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((64, 300), (300, 2)))
    y = jnp.asarray(np.asarray(x, np.float64) @ np.asarray(w, np.float64), jnp.float32)
    squared = lambda w, theta, b: jnp.mean((b[0] @ w - b[1]) ** 2)  # noqa: E731
    assert jnp.isfinite(quantities(squared, w, None, (x, y), "variance")["variance"]).all()


@pytest.mark.parametrize("dtype", [long(jnp.bfloat16), jnp.float16])
def test_rounding_to_16_bits_is_no_sum(dtype: Any) -> None:
    squared = lambda w, theta, b: jnp.mean((b[0] @ w - b[1]) ** 2)  # noqa: E731
    for seed in range(20):
        normal = np.random.default_rng(seed).normal
        w, x, y = (jnp.asarray(normal(size=s), dtype) for s in ((3, 2), (7, 3), (7, 2)))
        check_mean(squared, w, None, (x, y), [])
        check_mean(squared, w, None, (x, (x @ w).astype(dtype)), [])  # at a minimum
        with pytest.raises(ValueError, match="no mean over the examples"):
            check_mean(lambda *args: 1.1 ** len(args[2][0]) * squared(*args), w, None, (x, y), [])


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.uint8, long(jnp.int32)])
def test_targets_that_count_are_numbers(dtype: Any) -> None:
    declared = lambda w, theta, b: jnp.mean(hg.curvature.likelihood("sigmoid_cross_entropy", b[0] @ w, b[1]))  # noqa: E731
    targets = jnp.stack([Y, 1 - Y], 1)
    expected = quantities(declared, W, None, (X, targets.astype(jnp.float32)), "ggn_diagonal")["ggn_diagonal"]
    np.testing.assert_allclose(declared(W, None, (X, targets.astype(dtype))), declared(W, None, (X, targets * 1.0)))
    found = quantities(declared, W, None, (X, targets.astype(dtype)), "ggn_diagonal")["ggn_diagonal"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_labels_of_floats_are_no_classes() -> None:
    with pytest.raises(ValueError, match=r"it needs \(2,\) \(integers\) or \(2, 2\) .*; these are float32"):
        hg.curvature.likelihood("softmax_cross_entropy", X[:2] @ W, jnp.ones(2))


def test_parameters_that_are_no_real_floats() -> None:
    with pytest.raises(TypeError, match="params is complex64, and curvature is of real floats"):
        quantities(lambda w, theta, b: jnp.mean(jnp.abs(b[0] @ w)), W.astype(jnp.complex64), None, (X, Y), "variance")


def weighted(w: Any, theta: Any, batch: Any) -> Any:
    losses = hg.curvature.likelihood("softmax_cross_entropy", batch[0] @ w, batch[1])
    return jnp.sum(batch[2] * losses) / jnp.sum(batch[2])


def of_theta(w: Any, theta: Any, batch: Any) -> Any:
    return jnp.mean(theta * hg.curvature.likelihood("softmax_cross_entropy", batch[0] @ w, batch[1]))


@jax.custom_vjp
def passed(x: Any) -> Any:
    return x


passed.defvjp(lambda x: (x, None), lambda _, g: (g,))
WEIGHTS, ONES = jnp.asarray([1.0, 2.0, 5.0, 1.0, 1.0, 3.0]), jnp.ones(6)
COINCIDING: dict[str, tuple[Any, Any, Any, Any]] = {
    "a weighted mean at a head of zeros": (weighted, 0 * W, None, (X, Y, WEIGHTS)),
    "the same of a derivative rule": (lambda w, *given: weighted(passed(w), *given), 0 * W, None, (X, Y, WEIGHTS)),
    "a number for each example at zero": (lambda z, theta, b: jnp.mean((b[0][:, 0] - z) ** 2), 0 * ONES, None, (X,)),
    "equal weights in theta": (of_theta, W, ONES, (X, Y)),
}


@pytest.mark.parametrize("name", COINCIDING)
def test_a_loss_that_is_no_mean_where_values_coincide(name: str) -> None:
    loss, params, theta, batch = COINCIDING[name]
    slope = "theta" if theta is not None else "params"
    with pytest.raises(
        ValueError, match=f"no mean over the examples.*of its slope in `{slope}`.*divide by the number of ex"
    ):
        check_mean(loss, params, theta, batch, [])


def test_a_mask_with_a_zero_in_it_gives_no_number_of_one_example() -> None:
    with pytest.raises(
        ValueError, match=r"no mean over.* one at a time nan on average.*in place of a sum of weights or of a mask"
    ):
        quantities(weighted, W, None, (X, Y, ONES.at[2].set(0)), "ggn_diagonal")


def test_a_mean_that_its_slopes_are_taken_of_is_none_the_less_one() -> None:
    """Integers, keys and what has no derivative in theta, and derivative rules of reverse mode alone."""
    theta = {"key": jax.random.key(0), "n": 3, "scale": 2.0, "weight": jnp.ones(()), "calls": jnp.ones(())}

    def own(w: Any, theta: Any, b: Any) -> Any:
        called = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), theta["calls"])
        return theta["scale"] * theta["weight"] * theta["n"] * called * loss(passed(w), None, b)

    for w in (W, 0 * W):
        check_mean(own, w, theta, (X, Y), [])


@pytest.mark.parametrize("key", [0, np.zeros((3, 2), np.uint32), "a"])
def test_a_key_that_is_none(key: Any) -> None:
    with pytest.raises(TypeError, match="`key` must be one key of JAX, as jax.random.key"):
        quantities(loss, W, None, (X, Y), "kfac", key=key)
    with pytest.raises(TypeError, match="`key` must be one key of JAX, as jax.random.key"):
        Operator(loss, W, None, (X, Y), "fisher_mc", key=key)


def test_texts_are_no_arrays() -> None:
    for given, name in (
        ((W, {"a": "t"}, (X, Y)), r"theta\['a'\] is str 't'"),
        (({"w": "w"}, None, X), r"params\['w'\] is str"),
    ):
        with pytest.raises(TypeError, match=f"{name}.*let the loss close over it"):
            quantities(loss, *given, "ggn_diagonal")
    with pytest.raises(TypeError, match=r"batch\[1\] is ndarray .*let the loss close over it"):
        quantities(loss, W, None, (X, np.array(list("abcdef"))), "ggn_diagonal")
