"""Steps divided by Kronecker factors: reversible, differentiated exactly, and those of BackPACK's equation."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from networks import N, Network, attention, cross_entropy, dense, normal

import hypergrad as hg
from hypergrad.curvature import Kronecker, quantities


LEAST = 2.0**-16
HYPERS = {"learning_rate": 0.3, "damping": 0.05, "momentum": 0.75, "decay": 0.6, "l2": 0.01}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def kernels(outputs: str = "last") -> Network:
    """Two convolutions whose kernels have their outputs last (flax) or first (equinox), and a vector that is a layer."""
    rng = np.random.default_rng(5)
    params = {"k": normal(rng, 3, 2, 2, 4), "b": normal(rng, 4), "v": normal(rng, 3, 16), "u": normal(rng, 2)}
    if outputs == "first":
        params["k"] = jnp.transpose(params["k"], (3, 2, 0, 1))

    def model(p: Any, b: Any) -> Any:
        kernel = p["k"] if outputs == "last" else jnp.transpose(p["k"], (2, 3, 1, 0))
        x = b["x"] * (1 + (b["x"] @ p["u"])[..., None])
        names = ("NHWC", "HWIO", "NHWC")
        x = jax.nn.sigmoid(jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=names) + p["b"])
        return x.reshape(len(x), -1) @ p["v"].T

    return Network(model, cross_entropy, params, {"x": normal(rng, N, 4, 3, 2), "y": jnp.arange(N) % 3})


def end(h: Any, rule: Any, net: Network, adjoint: Any, steps: int = 6) -> Any:
    run = hg.train(net.loss, net.params, rule(**h), hg.full_batch(net.batch), steps=steps, adjoint=adjoint)
    return net.end(net.model(run.params, net.batch), net.batch) + 0.1 * jnp.sum(run.state["factors"]["b"])


def held(**h: Any) -> hg.KFLR:
    return hg.KFLR(**h, every=3)


RULES = {"kfac": (hg.KFAC, kernels), "kflr": (hg.KFLR, dense), "kfra": (hg.KFRA, dense), "held": (held, dense)}


@pytest.mark.long
@some_of("name", RULES, "kflr")
def test_hypergradients_agree_with_the_unrolled_ones(name: str) -> None:
    """And of one rule with differences."""
    rule, network = RULES[name]
    net, h = network(), {k: jnp.asarray(x) for k, x in HYPERS.items()}
    found, unrolled = (
        jax.jit(jax.grad(lambda h, adjoint=adjoint: end(h, rule, net, adjoint)))(h)
        for adjoint in (hg.Reversible(), hg.Unrolled())
    )
    for one in h:
        assert abs(float(found[one] - unrolled[one])) < 1e-8 * (1 + abs(float(unrolled[one]))), one
    if name != "kflr":
        return
    forward = jax.jit(lambda h: end(h, rule, net, hg.Reversible()))
    for one in ("learning_rate", "damping", "l2"):  # decays move by multiples of 2^-16
        size = 1e-5
        moved = [float(forward({**h, one: h[one] + s * size})) for s in (1, -1)]
        assert abs(float(found[one]) - (moved[0] - moved[1]) / (2 * size)) < 1e-6 * (1 + abs(float(found[one]))), one


@pytest.mark.long
@pytest.mark.parametrize("rule", [hg.KFAC(0.1), long(hg.KFRA(0.1, every=5))])
def test_it_comes_back(rule: Any) -> None:
    net = dense()
    assert hg.check_reversal(net.loss, net.params, rule, hg.full_batch(net.batch), steps=100).exact


def divided(g: Any, block: Kronecker, damping: float, order: Any) -> Any:
    """(G + damping)^-1 g by the matrices themselves, with the published split of the damping between the factors."""
    if block.a is None:
        return jnp.linalg.solve(block.b[0] + damping * jnp.eye(len(block.b[0])), g.reshape(-1)).reshape(g.shape)
    a, b = block.a[0], block.b[0]
    pi = jnp.sqrt(jnp.trace(a) / len(a) / (jnp.trace(b) / len(b)))
    s = damping**0.5
    matrix = order(g)
    solved = jnp.linalg.solve(a + pi * s * jnp.eye(len(a)), matrix) @ jnp.linalg.inv(b + s / pi * jnp.eye(len(b)))
    return jax.linear_transpose(order, g)(solved)[0]


ORDERS: dict[str, Any] = {  # parameter -> [in, out] as its layer has it
    "w": lambda w: w, "v": lambda w: w.T, "u": lambda w: w[:, None], "b": None, "c": None,
    "k": lambda k: jnp.transpose(k, (2, 0, 1, 3)).reshape(-1, 4),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("rule", "network"), [(hg.KFLR, kernels), (hg.KFLR, dense), (hg.KFRA, dense)])
def test_without_averages_it_is_the_published_rule(rule: Any, network: Any) -> None:
    net, rate, damping, l2 = network(), 0.1, 0.05, 0.01
    optimizer = rule(rate, damping, LEAST, LEAST, l2)
    run = hg.train(net.loss, net.params, optimizer, hg.full_batch(net.batch), steps=6)
    params: Any = net.params
    for _ in range(6):
        g = jax.grad(net.loss)(params, None, net.batch)
        blocks = quantities(net.loss, params, None, net.batch, rule.quantity)[rule.quantity]
        params = {
            k: w - rate * divided(g[k] + l2 * w, blocks[k], damping + l2, ORDERS[k]) for k, w in params.items() if k != "u"
        } | (
            {"u": params["u"] - rate * of_vector(g["u"] + l2 * params["u"], blocks["u"], damping + l2)}
            if "u" in params
            else {}
        )
    for name, w in params.items():
        np.testing.assert_allclose(run.params[name], w, atol=1e-4)


def of_vector(g: Any, block: Kronecker, damping: float) -> Any:
    """A layer whose weight is a vector has one factor: the product of both."""
    whole = jnp.kron(block.a[0], block.b[0])  # type: ignore[index]
    return jnp.linalg.solve(whole + damping * jnp.eye(len(whole)), g)


@pytest.mark.long
def test_kernels_with_outputs_first_are_those_with_outputs_last() -> None:
    ends = []
    for outputs in ("last", "first"):
        net = kernels(outputs)
        run = hg.train(net.loss, net.params, hg.KFLR(0.1, outputs=outputs), hg.full_batch(net.batch), steps=4)
        ends.append(run.params["k"])
    np.testing.assert_allclose(jnp.transpose(ends[1], (2, 3, 1, 0)), ends[0], rtol=1e-9)


@pytest.mark.parametrize(("net", "leaf"), [long(attention, "places"), (functools.partial(kernels, "first"), "k")])
def test_what_has_no_factors_is_told(net: Any, leaf: str) -> None:
    net = net()
    cure = "Give that leaf another rule by hg.partition"
    with pytest.raises(ValueError, match=f"has nothing for params\\['{leaf}'\\]. {cure}"):
        hg.train(net.loss, net.params, hg.KFLR(0.1), hg.full_batch(net.batch), steps=1)


@pytest.mark.long
def test_what_has_no_factors_goes_to_another_rule() -> None:
    net = attention()
    labels = {name: "rest" if name in ("table", "places") else "layers" for name in net.params}
    rules = {"layers": hg.KFLR(0.05), "rest": hg.SGD(0.05)}

    def value(rules: Any, adjoint: Any) -> Any:
        run = hg.train(net.loss, net.params, hg.partition(rules, labels), hg.full_batch(net.batch), steps=3, adjoint=adjoint)
        return run.losses.sum()

    found, unrolled = (
        jax.jit(jax.grad(lambda rules, a=adjoint: value(rules, a)))(rules) for adjoint in (hg.Reversible(), hg.Unrolled())
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10), found, unrolled)


@pytest.mark.long
def test_under_vmap() -> None:
    net = dense()
    rates = jnp.asarray([0.1, 0.2])
    one = lambda rate: end({**HYPERS, "learning_rate": rate}, hg.KFAC, net, hg.Reversible())  # noqa: E731
    both = jax.jit(jax.vmap(jax.grad(one)))(rates)
    np.testing.assert_allclose(both, [jax.jit(jax.grad(one))(rate) for rate in rates], rtol=1e-8)


@pytest.mark.long
def test_two_halves_are_the_whole() -> None:
    net = dense()
    train = lambda params, steps, **more: hg.train(  # noqa: E731
        net.loss, params, hg.KFLR(0.1, every=2), hg.full_batch(net.batch), steps=steps, **more
    )
    half = train(net.params, 4)
    rest, whole = train(half.params, 4, state=half.state), train(net.params, 8)
    for a, b in zip(jax.tree.leaves(rest.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "hg.KFLR: `every` must be an int of at least 1; got 0"),
        ({"outputs": "middle"}, "hg.KFLR: `outputs` must be one of 'last', 'first'; got 'middle'"),
        ({"damping": {"w": np.ones((4, 6)), "b": 0.1, "v": 0.1, "c": 0.1}}, "`damping` belongs to a whole leaf"),
        ({"damping": 0.0}, "nothing is added to the factors .* Take a positive `damping`"),
    ],
)
def test_bad_options(options: Any, message: str) -> None:
    net = dense()
    with pytest.raises(ValueError, match=message):
        hg.train(net.loss, net.params, hg.KFLR(0.1, **options), hg.full_batch(net.batch), steps=1)


@some_of("axis", [0, 1], 0)
def test_a_bias_with_an_axis_of_one_has_one_factor(axis: int) -> None:
    rng = np.random.default_rng(0)
    x, y = normal(rng, 16, 4), normal(rng, 16, 4)
    loss = lambda p, _, b: jnp.mean((3 * b[0] + p["b"].reshape(4) - b[1]) ** 2)  # noqa: E731
    rule, b = hg.KFLR(0.3, 0.1, momentum=0.5, decay=0.5), jnp.zeros(4)

    def end(b: Any, adjoint: Any = hg.Reversible()) -> Any:  # noqa: B008 (immutable)
        return hg.train(loss, {"b": b}, rule, hg.full_batch((x, y)), steps=2, adjoint=adjoint).params["b"]

    np.testing.assert_allclose(end(jnp.expand_dims(b, axis)).reshape(4), end(b), rtol=1e-12)
    slopes = [
        jax.grad(lambda b, a=a: jnp.sum(end(b, a) ** 3))(jnp.expand_dims(b, axis)) for a in (hg.Reversible(), hg.Unrolled())
    ]
    np.testing.assert_allclose(*slopes, rtol=1e-8)


@pytest.mark.long
def test_held_inverses_begin_at_a_head_of_zeros() -> None:
    """There B of the layer below is zero, and pi infinite."""
    net = dense()
    params = {**net.params, "v": 1e-6 * net.params["v"]}

    def weights(every: int, steps: int) -> Any:
        rule = hg.KFLR(1.0, 0.1, momentum=0.5, decay=0.5, every=every)
        return hg.train(net.loss, params, rule, hg.full_batch(net.batch), steps=steps)

    held = weights(2, 5)
    assert max(float(jnp.max(jnp.abs(held.state["inverses"][name]))) for name in "vw") <= 1.01 / 0.1**0.5
    for one, other in zip(jax.tree.leaves(weights(2, 1).params), jax.tree.leaves(weights(1, 1).params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
