"""Where the model ends is found only where it is what it seems: each loss here has the GGN's diagonal by brute force."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import some_of
from networks import Network, dense, diagonal, ggn, normal

from hypergrad.curvature import likelihood, quantities
from hypergrad.curvature._quantities import analysed


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


TARGETS = normal(np.random.default_rng(5), 3, 3)
MASK = jnp.asarray([True, True, False])
integer = optax.softmax_cross_entropy_with_integer_labels


def rows(b: Any) -> Any:
    return jax.nn.one_hot(b["y"], 3)


ENDS: dict[str, tuple[Any, str | None]] = {
    "plain": (lambda f, b: integer(f, b["y"]).mean(), "softmax_cross_entropy"),
    "one at a time": (lambda f, b: jax.vmap(integer)(f, b["y"]).mean(), "softmax_cross_entropy"),
    "jitted": (lambda f, b: jax.jit(lambda f, y: integer(f, y).mean())(f, b["y"]), "softmax_cross_entropy"),
    "negative": (lambda f, b: -integer(f, b["y"]).mean(), "softmax_cross_entropy"),
    "rows": (lambda f, b: optax.softmax_cross_entropy(f, rows(b)).mean(), "log_softmax"),
    "rows of any sum": (lambda f, b: optax.softmax_cross_entropy(f, TARGETS[b["y"]]).mean(), "log_softmax"),
    "half": (lambda f, b: optax.l2_loss(f, rows(b)).sum(-1).mean(), "half_squared_error"),
    "sigmoid": (lambda f, b: optax.sigmoid_binary_cross_entropy(f, rows(b)).mean(), "sigmoid_cross_entropy"),
    "another axis": (lambda f, b: jax.vmap(lambda f: optax.softmax_cross_entropy(
        jnp.outer(f, f), TARGETS, axis=0).sum())(f).mean(), None),
    "masked": (lambda f, b: optax.softmax_cross_entropy(f, rows(b), where=jnp.broadcast_to(MASK, f.shape)).mean(), None),
    "outputs as targets": (lambda f, b: optax.softmax_cross_entropy(rows(b), jnp.tanh(f)).mean(), None),
    "both": (lambda f, b: optax.squared_error(f, jnp.sin(f)).mean(), None),
    "classes along two axes": (lambda f, b: integer(
        jnp.stack([f, 2 * f], 1), b["y"], axis=(-2, -1)).mean(), None),
    "targets broadcast": (lambda f, b: optax.sigmoid_binary_cross_entropy(
        f[:, :, None], rows(b)[:, None, :]).mean(), None),
    "examples left out": (lambda f, b: jnp.where(b["y"] > 0, integer(f, b["y"]), 0).mean(), "softmax_cross_entropy"),
    "of bounded losses": (lambda f, b: jnp.minimum(integer(f, b["y"]), 1.0).mean(), None),
    "two": (lambda f, b: (integer(f, b["y"]) + integer(2 * f, b["y"])).mean(), None),
    "focal": (lambda f, b: (integer(f, b["y"]) ** 2).mean(), None),
    "smoothed by hand": (lambda f, b: (integer(f, b["y"]) + 0.1 * jax.nn.log_softmax(f)[:, 0]).mean(), None),
    "by hand": (lambda f, b: jnp.mean((f - rows(b)) ** 4), None),
}  # fmt: skip


@some_of(
    "name",
    ENDS,
    "plain",
    "rows",
    "sigmoid",
    "another axis",
    "masked",
    "classes along two axes",
    "examples left out",
    "two",
)
def test_ends(name: str) -> None:
    end, expected = ENDS[name]
    net: Network = dense()._replace(end=end)
    found = analysed(net.loss, net.params, None, net.batch)[1]
    assert found is not None and (found.kind.name if found.kind else None) == expected
    if expected is None:
        with pytest.raises(ValueError, match="'ggn_diagonal_mc' draws labels.*does not end in a likelihood that is known"):
            quantities(net.loss, net.params, None, net.batch, "ggn_diagonal_mc", key=jax.random.key(0))
    if name == "another axis":  # its outputs are the products of what brute force calls outputs
        return
    got = jax.jit(lambda p, b: quantities(net.loss, p, None, b, "ggn_diagonal"))(net.params, net.batch)["ggn_diagonal"]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(diagonal(net, ggn(net))), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_an_auxiliary_loss_of_a_hidden_layer_is_part_of_the_end() -> None:
    """What does not go through the outputs would be forgotten: the model then ends where all has met."""
    net = dense()
    hidden = lambda p, b: jnp.tanh(b["x"] @ p["w"] + p["b"])  # noqa: E731
    loss = lambda p, theta, b: net.loss(p, None, b) + jnp.mean(hidden(p, b) ** 2)  # noqa: E731
    end = analysed(loss, net.params, None, net.batch)[1]
    assert end is None or end.kind is None


X = np.random.default_rng(6).normal(size=(7, 3))
EMPTY = {
    "summed": (lambda p: jnp.sum(p["e"]), (0, 2)),
    "in a penalty with all": (lambda p: 0.1 * sum(jnp.sum(x**2) for x in p.values()), (0, 2)),
    "in a product": (lambda p: jnp.sum(jnp.mean((X[:1] @ p["e"]) ** 2, 0)), (3, 0)),
}


@some_of("name", EMPTY, "summed", "in a product")
@pytest.mark.parametrize("declared", [False, True])
def test_a_leaf_without_entries_is_no_road_past_the_end(name: str, declared: bool) -> None:
    term, shape = EMPTY[name]
    squared = (lambda f: likelihood("squared_error", f, jnp.ones_like(f))) if declared else (lambda f: (f - 1) ** 2)
    loss = lambda p, theta, b: jnp.mean(squared(b @ p["w"])) + term(p)  # noqa: E731
    w = normal(np.random.default_rng(7), 3)
    found = quantities(loss, {"w": w, "e": jnp.zeros(shape)}, None, X, "ggn_diagonal")["ggn_diagonal"]["w"]
    np.testing.assert_allclose(found, 2 * np.mean(X**2, 0), rtol=1e-12)


GENERAL = {  # a weight that no layer has, in the model, and a penalty on it; a constant times a weight, squared
    "general": (
        lambda p, b: jnp.einsum("bi,bij->bj", b, jnp.stack([p["w"] * jnp.sin(p["w"])] * len(b))),
        lambda w: 0.1 * jnp.sum(w**2),
    ),
    "dense": (lambda p, b: b @ p["w"], lambda w: jnp.sum((jnp.ones((2, 3)) @ w) ** 2)),
}


@pytest.mark.parametrize("name", GENERAL)
def test_a_penalty_is_no_road_past_the_end(name: str) -> None:
    model, penalty = GENERAL[name]
    w = {"w": normal(np.random.default_rng(7), 3, 2)}

    def declared(p: Any, theta: Any, b: Any) -> Any:
        return jnp.mean(likelihood("squared_error", model(p, b), jnp.ones((len(b), 2)))) + theta * penalty(p["w"])

    names = ["ggn_diagonal", "individual_gradients"]
    alone, both = (quantities(declared, w, theta, X, names) for theta in (0.0, 1.0))
    np.testing.assert_allclose(both["ggn_diagonal"]["w"], alone["ggn_diagonal"]["w"], rtol=1e-12)
    more = (both["individual_gradients"]["w"] - alone["individual_gradients"]["w"]).sum(0)
    np.testing.assert_allclose(more, jax.grad(penalty)(w["w"]), rtol=1e-9)


def hidden(p: Any, theta: Any, b: Any) -> Any:
    return jnp.mean((jnp.tanh(b @ p[0]) * p[1] - 1) ** 2) + jnp.mean((b @ p[0]) ** 2)


def heads(p: Any, theta: Any, b: Any) -> Any:
    return jnp.mean((b @ p[0]) ** 2) + jnp.mean((jnp.tanh(b @ p[1]) - 1) ** 2)


def beside_a_line(p: Any, theta: Any, b: Any) -> Any:
    f = b @ p[0]
    return jnp.mean(jnp.tanh(f) * p[1]) + jnp.mean(f**2)


def general(p: Any, theta: Any, b: Any) -> Any:
    return jnp.mean((jnp.tanh(p[1]) * b[:, 0] - 1) ** 2) + jnp.mean(b @ p[0])


@pytest.mark.parametrize("loss", [hidden, heads, beside_a_line, general])
def test_where_a_sum_of_losses_meets_is_no_end(loss: Any) -> None:
    """Its GGN would be zero."""
    weights = list(normal(np.random.default_rng(7), 2, 3)) if loss is heads else [jnp.ones(3), jnp.ones(())]
    with pytest.raises(ValueError, match="adds losses of several outputs.*take the curvature of each apart and add"):
        quantities(loss, weights, None, X, "ggn_diagonal")


BENT: dict[str, Any] = {
    "where": lambda x: jnp.where(jnp.arange(len(x)) > 0, x, 0).mean(),
    "minimum": lambda x: jnp.minimum(x, 8.0).mean(),
    "nan_to_num": lambda x: jnp.nan_to_num(x).mean(),
    "relu": lambda x: jax.nn.relu(x).mean(),
    "absolute": lambda x: (jnp.abs(x - 0.1) + 0.1).mean(),
    "cumsum": lambda x: jnp.cumsum(x)[-1],
    "pad": lambda x: jnp.pad(x, (0, 1)).sum(),
    "mask": lambda x: jnp.mean((x < 8.0) * x),
    "cond": lambda x: jnp.mean(jax.vmap(lambda x: jax.lax.cond(x > -1, lambda x: x, lambda x: 0 * x, x))(x)),
}


@some_of("name", BENT, "where", "relu", "mask")
def test_nor_where_what_follows_is_straight_piece_by_piece(name: str) -> None:
    two = lambda p, theta, b: BENT[name]((b @ p[0]) ** 2 + (jnp.tanh(b @ p[1]) - 1) ** 2)  # noqa: E731
    with pytest.raises(ValueError, match="adds losses of several outputs"):
        quantities(two, list(normal(np.random.default_rng(7), 2, 3)), None, X, "ggn_diagonal")


def test_a_penalty_by_a_known_function_is_no_end() -> None:
    net = dense()
    penalized = lambda p, theta, b: net.loss(p, None, b) + optax.l2_loss(p["w"]).sum()  # noqa: E731
    assert analysed(penalized, net.params, None, net.batch)[1] == analysed(net.loss, net.params, None, net.batch)[1]


def test_an_absolute_error_has_no_curvature() -> None:
    found = quantities(lambda p, theta, b: jnp.mean(jnp.abs(b @ p[0] - 1)), [jnp.ones(3)], None, X, "ggn_diagonal")
    np.testing.assert_array_equal(found["ggn_diagonal"][0], 0)


def test_the_curvature_of_a_loss_that_is_linear_in_its_outputs_is_none() -> None:
    loss = lambda p, theta, b: jnp.mean(jnp.tanh(b @ p[0]) * p[1] + b[:, 0])  # noqa: E731
    found = quantities(loss, [jnp.ones(3), jnp.ones(())], None, X, "ggn_diagonal")["ggn_diagonal"]
    np.testing.assert_array_equal(found[0], 0)
