"""Every quantity equals brute force, on networks of all kinds of layers; and the closed forms."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import long, some_of
from networks import NETWORKS, N, Network, cross_entropy, dense, diagonal, ggn, gradients, hessian, normal

import hypergrad as hg
from hypergrad.curvature import Diagonal, Kronecker, quantities


EXACT = ("individual_gradients", "squared_norms", "second_moment", "variance", "ggn_diagonal", "hessian_diagonal")


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def apart(found: Any, expected: Any) -> float:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)


def of(net: Network, *names: str, **options: Any) -> Any:
    return jax.jit(lambda p, b: quantities(net.loss, p, None, b, names, **options))(net.params, net.batch)


@some_of(
    "name",
    NETWORKS,
    *(name for name in NETWORKS if name not in ("dense", "attention", "recurrent", "penalty", "unusual", "squared error")),
)
def test_quantities_equal_brute_force(name: str) -> None:
    net = NETWORKS[name]()
    each = gradients(net)
    mean, moment = (jax.tree.map(lambda x, k=k: jnp.mean(x**k, 0), each) for k in (1, 2))
    expected = {
        "individual_gradients": jax.tree.map(lambda x: x / N, each),
        "squared_norms": jax.tree.map(lambda x: jnp.sum((x / N) ** 2, tuple(range(1, x.ndim))), each),
        "second_moment": moment,
        "variance": jax.tree.map(lambda m, g: m - g * g, moment, mean),
        "ggn_diagonal": diagonal(net, ggn(net)),
        "hessian_diagonal": diagonal(net, hessian(net)),
    }
    found = of(net, *EXACT)
    for quantity in EXACT:
        assert apart(found[quantity], expected[quantity]) < 1e-10, quantity


@some_of("name", ["dense", "convolution", "attention"], "convolution")
def test_sampled_ones_are_within_three_standard_errors(name: str) -> None:
    net, draws = NETWORKS[name](), 64
    one = jax.jit(lambda key: of(net, "ggn_diagonal_mc", key=key)["ggn_diagonal_mc"])
    found = jax.vmap(one)(jax.random.split(jax.random.key(0), draws))
    exact = diagonal(net, ggn(net))
    for x, truth in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        error = float(jnp.std(jnp.sum(x.reshape(draws, -1), 1))) / draws**0.5  # of the trace of the leaf's block
        assert abs(float(jnp.mean(jnp.sum(x.reshape(draws, -1), 1)) - jnp.sum(truth))) < 3 * error + 1e-12


@pytest.mark.long
def test_many_samples_are_the_exact_diagonal() -> None:
    net = dense()
    found = of(net, "ggn_diagonal_mc", key=jax.random.key(1), samples=20_000)["ggn_diagonal_mc"]
    assert apart(found, diagonal(net, ggn(net))) < 0.01


def blocks(net: Network) -> Any:
    """The diagonal blocks of the whole GGN, leaf by leaf."""
    matrix, begin, found = ggn(net), 0, []
    for x in jax.tree.leaves(net.params):
        found.append(matrix[begin : begin + x.size, begin : begin + x.size])
        begin += x.size
    return jax.tree.unflatten(jax.tree.structure(net.params), found)


def test_kflr_is_exact_where_it_can_be() -> None:
    """Of biases always; of weights for one example, and where derivatives in the outputs are the same for all."""
    net = dense()
    exact, found = blocks(net), of(net, "kflr")["kflr"]
    assert apart(found["c"].b[0], exact["c"]) < 1e-12 and found["c"].a is None
    assert apart(found["b"].b[0], exact["b"]) < 1e-12
    one = net._replace(batch=jax.tree.map(lambda x: jnp.repeat(x[:1], N, 0), net.batch))
    exact, found = blocks(one), of(one, "kflr")["kflr"]
    assert apart(jnp.kron(found["w"].a[0], found["w"].b[0]), exact["w"]) < 1e-12
    # v is used transposed: its entries are [out, in].
    assert apart(jnp.kron(found["v"].b[0], found["v"].a[0]), exact["v"]) < 1e-12


def test_kfac_tends_to_kflr() -> None:
    net = dense()
    found = of(net, "kfac", "kflr", key=jax.random.key(0), samples=20_000)
    assert apart(found["kfac"], found["kflr"]) < 0.02


@pytest.mark.parametrize("curved", [False, True])
def test_kfra_is_kflr_of_deep_linear_networks_alone(curved: bool) -> None:
    net = dense()
    act = jnp.tanh if curved else lambda x: x
    model = lambda p, b: act(b["x"] @ p["w"] + p["b"]) @ p["v"].T + p["c"]  # noqa: E731
    net = net._replace(model=model)
    found = of(net, "kfra", "kflr")
    assert apart(found["kfra"]["v"], found["kflr"]["v"]) < 1e-12  # the last layer, always
    assert (apart(found["kfra"]["w"], found["kflr"]["w"]) < 1e-12) != curved


def test_kfra_averages_slopes_between_layers() -> None:
    """G of the first layer, entry by entry, is (v G v') times the mean of products of slopes."""
    net = dense()
    found = of(net, "kfra")["kfra"]
    z = net.batch["x"] @ net.params["w"] + net.params["b"]
    slopes = 1 - jnp.tanh(z) ** 2
    p = jax.nn.softmax(net.model(net.params, net.batch))
    top = jnp.mean(jax.vmap(lambda p: jnp.diag(p) - jnp.outer(p, p))(p), 0)
    expected = (net.params["v"].T @ top @ net.params["v"]) * (slopes.T @ slopes / N)
    assert apart(found["w"].b[0], expected) < 1e-12
    assert apart(found["w"].a[0], net.batch["x"].T @ net.batch["x"] / N) < 1e-12


def test_convolutions_share_positions_in_two_ways() -> None:
    """Expanded, positions are more examples; reduced, they are added before they are squared."""
    net = NETWORKS["convolution"]()
    expand, reduce = (of(net, "kflr", sharing=sharing)["kflr"]["k"] for sharing in ("expand", "reduce"))
    assert expand.a.shape == reduce.a.shape == (1, 18, 18) and expand.b.shape == (1, 4, 4)
    bias = of(net, "kflr")["kflr"]["b"]
    assert apart(reduce.b, bias.b) < 1e-12  # BackPACK's: the bias's block
    exact = blocks(net)["k"]
    ratio = lambda f: float(jnp.trace(f.a[0]) * jnp.trace(f.b[0]) / jnp.trace(exact))  # noqa: E731
    assert 0.5 < ratio(expand) < 2
    groups = of(net, "kflr")["kflr"]["g"]
    assert groups.a.shape == (2, 8, 8) and groups.b.shape == (2, 3, 3)


def test_what_has_no_factors_has_its_diagonal() -> None:
    net = NETWORKS["attention"]()
    found = of(net, "kflr", "ggn_diagonal")
    assert isinstance(found["kflr"]["scale"], Diagonal) and isinstance(found["kflr"]["q"], Kronecker)
    assert apart(found["kflr"]["scale"].values, found["ggn_diagonal"]["scale"]) == 0
    assert isinstance(found["kflr"]["table"], Diagonal)  # an embedding, and a dense layer


def test_linear_regression_has_a_closed_form() -> None:
    rng = np.random.default_rng(0)
    x, y, w = normal(rng, 20, 3), normal(rng, 20, 2), normal(rng, 3, 2)
    loss = lambda w, theta, b: optax.squared_error(b[0] @ w, b[1]).sum(-1).mean()  # noqa: E731
    found = quantities(loss, w, None, (x, y), ["ggn_diagonal", "hessian_diagonal", "kflr", "kfra"])
    exact = jnp.kron(2 * x.T @ x / 20, jnp.eye(2))
    for name in ("ggn_diagonal", "hessian_diagonal"):
        assert apart(found[name].reshape(-1), jnp.diag(exact)) < 1e-12
    for name in ("kflr", "kfra"):
        assert apart(jnp.kron(found[name].a[0], found[name].b[0]), exact) < 1e-12


@pytest.mark.parametrize("zero", [True, False])
def test_logistic_regression_has_a_closed_form(zero: bool) -> None:
    """X' diag(p (1 - p)) X / N; at zero weights, and of one example, a product of its factors."""
    rng = np.random.default_rng(0)
    x, w = normal(rng, 20, 3), normal(rng, 3) * (not zero)
    y = jnp.asarray(rng.integers(0, 2, 20), float)
    loss = lambda w, theta, b: optax.sigmoid_binary_cross_entropy(b[0] @ w, b[1]).mean()  # noqa: E731
    found = quantities(loss, w, None, (x, y), ["ggn_diagonal", "hessian_diagonal", "kflr"])
    p = jax.nn.sigmoid(x @ w)
    exact = (x * (p * (1 - p))[:, None]).T @ x / 20
    for name in ("ggn_diagonal", "hessian_diagonal"):
        assert apart(found[name], jnp.diag(exact)) < 1e-12
    assert apart(found["kflr"].b[0, 0, 0], jnp.mean(p * (1 - p))) < 1e-12
    alone = quantities(loss, w, None, (x[:1], y[:1]), "kflr")["kflr"]
    assert apart(jnp.kron(alone.a[0], alone.b[0]), p[0] * (1 - p[0]) * jnp.outer(x[0], x[0])) < 1e-12
    assert (apart(jnp.kron(found["kflr"].a[0], found["kflr"].b[0]), exact) < 1e-12) == zero


@pytest.mark.long
def test_softmax_regression_at_zero_weights_is_a_product() -> None:
    rng = np.random.default_rng(0)
    x, y = normal(rng, 20, 3), jnp.arange(20) % 4
    loss = lambda w, theta, b: cross_entropy(b["x"] @ w, b)  # noqa: E731
    found = quantities(loss, jnp.zeros((3, 4)), None, {"x": x, "y": y}, "kflr")["kflr"]
    p = jnp.full(4, 0.25)
    exact = jnp.kron(x.T @ x / 20, jnp.diag(p) - jnp.outer(p, p))
    assert apart(jnp.kron(found.a[0], found.b[0]), exact) < 1e-12


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("softmax_cross_entropy", "rows"),
        long("sigmoid_cross_entropy", "like"),
        long("squared_error", "like"),
        long("poisson", "like"),
    ],
)
def test_declared_likelihoods(name: str, targets: str) -> None:
    """Their factors are the Hessian, and labels drawn of the model give it on average; weights of examples count."""
    net, rng = dense(), np.random.default_rng(0)
    y = jnp.asarray(rng.integers(0, 2, (N, 3)).astype(float))
    y = jax.nn.softmax(y) if targets == "rows" else y
    value = lambda f, b: hg.curvature.likelihood(name, f, b["y"])  # noqa: E731
    end = lambda f, b: jnp.mean((value(f, b).T * b["weight"]).T)  # noqa: E731
    net = net._replace(batch={**net.batch, "y": y, "weight": jnp.asarray(rng.random(N))}, end=end)
    exact = diagonal(net, ggn(net))
    found = of(net, "ggn_diagonal", "ggn_diagonal_mc", key=jax.random.key(0), samples=20_000)
    assert apart(found["ggn_diagonal"], exact) < 1e-12
    assert apart(found["ggn_diagonal_mc"], exact) < 0.05 * max(float(jnp.max(x)) for x in jax.tree.leaves(exact))


@pytest.mark.parametrize("axis", [-1, long(0)])
def test_a_cross_entropy_by_hand(axis: int) -> None:
    """Found by its logarithms, along the last axis; weights of classes and smoothed labels count."""
    net, weight = dense(), jnp.asarray([1.0, 2.0, 0.5])

    def end(f: Any, b: Any) -> Any:
        logs = jax.nn.log_softmax(f) if axis == -1 else jax.nn.log_softmax(f.T, axis=0).T
        smooth = 0.9 * jax.nn.one_hot(b["y"], 3) + 0.1 / 3
        return -jnp.mean(jnp.sum(logs * smooth, -1) * weight[b["y"]])

    net = net._replace(end=end)
    assert apart(of(net, "ggn_diagonal")["ggn_diagonal"], diagonal(net, ggn(net))) < 1e-12
    if axis == -1:
        found = of(net, "ggn_diagonal_mc", key=jax.random.key(0), samples=20_000)["ggn_diagonal_mc"]
        assert apart(found, diagonal(net, ggn(net))) < 0.02


def test_in_jit_and_vmap_and_again() -> None:
    net = dense()
    once = quantities(net.loss, net.params, None, net.batch, "variance")["variance"]
    assert apart(of(net, "variance")["variance"], once) < 1e-12
    two = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), net.params)
    both = jax.vmap(lambda p: of(net._replace(params=p), "variance")["variance"])(two)
    assert apart(jax.tree.map(lambda x: x[0], both), once) < 1e-12


@pytest.mark.long
def test_gradients_through_quantities() -> None:
    """They are functions like others: a penalty on the variance has a derivative."""
    net = dense()
    spread = lambda w: sum(map(jnp.sum, jax.tree.leaves(of(net._replace(params=w), "variance")["variance"])))  # noqa: E731
    size = 1e-5
    found = jax.grad(spread)(net.params)["w"][0, 0]
    moved = [spread({**net.params, "w": net.params["w"].at[0, 0].add(s * size)}) for s in (1, -1)]
    assert abs(float(found - (moved[0] - moved[1]) / (2 * size))) < 1e-7


def test_the_variance_of_gradients_that_share_their_digits() -> None:
    """In float32: means of squares less squares of means would be nothing but rounding."""
    x, y = 1 + 1e-4 * np.arange(4.0)[:, None], np.full((4, 1), 1000.0)
    loss = lambda p, theta, b: jnp.mean((b[0] @ p - b[1]) ** 2)  # noqa: E731
    batch = (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
    found = quantities(loss, jnp.ones((1, 1), jnp.float32), None, batch, "variance")["variance"]
    each = 2 * (np.float32(x) - y.astype(np.float64)) * np.float32(x)
    np.testing.assert_allclose(found, np.var(each, 0)[:, None], rtol=2e-3)
