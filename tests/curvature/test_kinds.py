"""Layers are found, declared, or taught."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from networks import NETWORKS, attention, convolution, normal

import hypergrad as hg
from hypergrad.curvature import _kinds, _uses, layers, quantities
from hypergrad.curvature._likelihoods import SIGMOID, SOFTMAX


def kinds(net: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for use in layers(net.loss, net.params, None, net.batch):
        found.setdefault(use.parameter, set()).add(use.kind)
    return found


def test_layers_of_a_transformer() -> None:
    assert kinds(attention()) == {
        **{f"params['{name}']": {"dense"} for name in "qkv"}, "params['table']": {"embedding", "dense"},
        "params['places']": {"shift"}, "params['scale']": {"scale"}, "params['shift']": {"shift"},
    }  # fmt: skip


def test_layers_of_convolutions() -> None:
    assert kinds(convolution()) == {
        "params['k']": {"convolution"}, "params['g']": {"convolution"}, "params['b']": {"shift"}, "params['v']": {"dense"},
    }  # fmt: skip


def test_what_is_no_layer_is_listed_with_the_operation() -> None:
    net = NETWORKS["unusual"]()
    found = {use.parameter: str(use) for use in layers(net.loss, {**net.params, "z": jnp.ones(2)}, None, net.batch)}
    assert found["params['u']"] == "params['u'] (3, 3): general (dot_general)"
    assert found["params['z']"] == "params['z'] (2,): general (not used)"


@some_of("library", ["equinox", "flax"], "equinox")
def test_layers_of_libraries(library: str) -> None:
    """Their modules, under `vmap` over examples or not, with a normalization and a convolution."""
    if library == "equinox":
        import equinox as eqx

        keys = jax.random.split(jax.random.key(0), 3)
        model = eqx.nn.Conv2d(1, 2, 3, key=keys[0]), eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 3, key=keys[1])
        params, static = eqx.partition(model, eqx.is_array)

        def outputs(params: Any, x: Any) -> Any:
            convolution, norm, linear = eqx.combine(params, static)
            return jax.vmap(lambda x: linear(norm(jax.nn.relu(convolution(x)).reshape(-1))))(x)
    else:
        nn = pytest.importorskip("flax.linen")

        class Model(nn.Module):  # type: ignore[name-defined,misc]
            @nn.compact
            def __call__(self, x: Any) -> Any:
                x = jnp.moveaxis(x, 1, -1)
                x = jax.nn.relu(nn.Conv(2, (3, 3), padding="VALID")(x)).reshape(len(x), -1)
                return nn.Dense(3)(nn.LayerNorm()(x))

        outputs = Model().apply
        params = Model().init(jax.random.key(0), jnp.ones((1, 1, 4, 4)))
    end = lambda f, y: hg.curvature.likelihood("softmax_cross_entropy", f, y).mean()  # noqa: E731
    loss = lambda p, theta, b: end(outputs(p, b[0]), b[1])  # noqa: E731
    batch = jax.random.normal(jax.random.key(1), (4, 1, 4, 4)), jnp.arange(4) % 3
    kinds = [use.kind for use in layers(loss, params, None, batch)]
    assert sorted(kinds) == ["convolution", "dense", "scale", "shift", "shift", "shift"]
    found = jax.jit(lambda p, b: quantities(loss, p, None, b, "individual_gradients"))(params, batch)
    summed = jax.tree.map(lambda x: x.sum(0), found["individual_gradients"])
    for a, b in zip(jax.tree.leaves(summed), jax.tree.leaves(jax.jit(jax.grad(loss))(params, None, batch)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def low_rank(p: Any, x: Any) -> Any:
    """A dense layer that no pattern sees: its weight is scaled before it is used."""
    return hg.curvature.register(x @ (2.0 * p["w"] / 2.0) + p["b"], x, (p["w"], p["b"]))


def test_a_declared_layer() -> None:
    rng = np.random.default_rng(0)
    params = {"w": normal(rng, 3, 2), "b": normal(rng, 2)}
    batch = normal(rng, 6, 3), jnp.arange(6) % 2
    end = lambda f, y: hg.curvature.likelihood("softmax_cross_entropy", f, y).mean()  # noqa: E731
    declared = lambda p, theta, b: end(low_rank(p, b[0]), b[1])  # noqa: E731
    plain = lambda p, theta, b: end(b[0] @ p["w"] + p["b"], b[1])  # noqa: E731
    assert [use.kind for use in layers(declared, params, None, batch)] == ["shift", "dense"]
    names = ["variance", "squared_norms", "kflr"]
    of = lambda loss: jax.jit(lambda p, b: quantities(loss, p, None, b, names))(params, batch)  # noqa: E731
    found, expected = of(declared), of(plain)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


class Doubled(hg.curvature.Layer):
    """x @ w with w [in, out], as a batched product of one."""

    name = "doubled"

    def match(self, equation: Any, place: int) -> bool:
        return (
            equation.primitive.name == "dot_general"
            and place == 1
            and equation.params["dimension_numbers"][1] == ((0,), (0,))
        )

    def matrices(self, equation: Any, place: int, operands: list[Any], cotangent: Any) -> Any:
        return operands[0], cotangent

    def arrange(self, equation: Any, place: int, weight: Any) -> Any:
        return weight


def test_a_pattern_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns: list[hg.curvature.Layer] = [_kinds.Dense(), _kinds.Convolution(), _kinds.Embedding()]
    monkeypatch.setattr(_kinds, "PATTERNS", patterns)
    monkeypatch.setattr("hypergrad.curvature._uses.PATTERNS", patterns)
    rng = np.random.default_rng(0)
    w, batch = normal(rng, 2, 3, 4), (normal(rng, 5, 2, 3),)
    loss = lambda w, theta, b: jnp.mean(jnp.sum(jax.lax.batch_matmul(jnp.moveaxis(b[0], 1, 0), w) ** 2, (0, 2)))  # noqa: E731
    assert [use.kind for use in layers(loss, w, None, batch)] == ["general"]
    expected = quantities(loss, w, None, batch, "second_moment")
    hg.curvature.add_pattern(Doubled())
    assert [use.kind for use in layers(loss, w, None, batch)] == ["doubled"]
    found = quantities(loss, w, None, batch, "second_moment")
    np.testing.assert_allclose(found["second_moment"], expected["second_moment"], rtol=1e-5)


def of_scan(p: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]


IN_PARTS = {
    "layers of a stack": (of_scan, (2, 4, 4)),
    "a part": (lambda p, x: jnp.tanh(x @ p["w"][:4]), (6, 4)),
    "the transpose as well": (lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T, (4, 4)),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_what_is_used_in_parts_or_turned_has_a_diagonal(name: str) -> None:
    """Kronecker factors are those of a whole weight, laid out alike wherever it is used."""
    forward, shape = IN_PARTS[name]
    params, x = {"w": normal(np.random.default_rng(0), *shape)}, normal(np.random.default_rng(1), 5, 4)
    loss = lambda p, _, b: jnp.mean((forward(p, b[0]) - b[1]) ** 2)  # noqa: E731
    batch = x, normal(np.random.default_rng(2), 5, 4)
    found = quantities(loss, params, None, batch, ["kflr", "ggn_diagonal"])
    np.testing.assert_allclose(found["kflr"]["w"].values, found["ggn_diagonal"]["w"], rtol=1e-5, atol=1e-7)
    operator = hg.curvature.Operator(loss, params, None, batch, "kflr")
    np.testing.assert_allclose(operator.diagonal().reshape(shape), found["ggn_diagonal"]["w"], rtol=1e-5, atol=1e-7)
    one = operator.inverse(0.5)(np.ones(operator.shape[0], np.float32))
    np.testing.assert_allclose(one, 1 / (operator.diagonal() + 0.5), rtol=1e-5)


class Cumulative(hg.curvature.Layer):
    name = "cumulative"

    def match(self, e: Any, place: int) -> bool:
        return bool(e.primitive.name == "cumsum")

    def matrices(self, e: Any, place: int, operands: list[Any], cotangent: Any) -> Any:
        return jnp.tril(jnp.ones((4, 4)))[None], cotangent.reshape(1, 4, 1)

    def arrange(self, e: Any, place: int, weight: Any) -> Any:
        return weight[None, :, None]


def test_a_kind_that_is_taught_later_counts_for_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = lambda p, _, b: jnp.mean(hg.curvature.likelihood("squared_error", jnp.cumsum(p["w"]) * b[0], b[1]))  # noqa: E731
    arguments = (
        loss,
        {"w": normal(np.random.default_rng(0), 4)},
        None,
        (normal(np.random.default_rng(1), 6, 4), normal(np.random.default_rng(2), 6, 4)),
        "kflr",
    )
    assert isinstance(quantities(*arguments)["kflr"]["w"], hg.curvature.Diagonal)
    monkeypatch.setattr(_kinds, "PATTERNS", _kinds.PATTERNS.copy())
    monkeypatch.setattr(_uses, "PATTERNS", _kinds.PATTERNS)
    hg.curvature.add_pattern(Cumulative())
    assert isinstance(quantities(*arguments)["kflr"]["w"], hg.curvature.Kronecker)


def test_registered_kinds_of_one_name_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kinds, "REGISTERED", _kinds.REGISTERED.copy())
    monkeypatch.setattr(_uses, "REGISTERED", _kinds.REGISTERED)

    class Times(hg.curvature.Layer):
        name = "times"

        def __init__(self, factor: float) -> None:
            self.factor = factor

        def match(self, e: Any, place: int) -> bool:
            return False

        def matrices(self, e: Any, place: int, operands: list[Any], cotangent: Any) -> Any:
            return self.factor * operands[1][..., None, None], cotangent[..., None, :]

        def arrange(self, e: Any, place: int, weight: Any) -> Any:
            return weight[None, None]

    params = {"a": normal(np.random.default_rng(0), 2), "b": normal(np.random.default_rng(1), 2)}

    def loss(p: Any, _: Any, b: Any) -> Any:
        (x, y), kinds = b, (Times(1.0), Times(3.0))  # made anew at each call
        made = [
            hg.curvature.register(kind.factor * x[:, None] * w, x, w, kind)
            for kind, w in zip(kinds, p.values(), strict=True)
        ]
        return jnp.mean((sum(made) - y) ** 2)

    batch = normal(np.random.default_rng(2), 5), normal(np.random.default_rng(3), 5, 2)
    found = quantities(loss, params, None, batch, "individual_gradients")["individual_gradients"]
    assert [name for name in _kinds.REGISTERED if name.startswith("times")] == ["times", "times_2"]
    for name, expected in jax.grad(loss)(params, None, batch).items():
        np.testing.assert_allclose(found[name].sum(0), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [long(jnp.float32), long(jnp.bfloat16)])
def test_a_diagonal_of_few_bits_counts_all_positions(dtype: Any) -> None:
    """600 times 2, which stops at 512 where it is added up in bfloat16."""

    def loss(w: Any, theta: Any, x: Any) -> Any:
        h = jax.lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.mean(jnp.sum(h.astype(jnp.float32) ** 2, (1, 2)))

    w, x = jnp.zeros((620, 1, 1), dtype), jnp.ones((1, 1219, 1), dtype)
    found = quantities(loss, w, None, x, ["hessian_diagonal", "ggn_diagonal"])
    assert {name: float(value[0, 0, 0]) for name, value in found.items()} == dict.fromkeys(found, 1200.0)


@pytest.mark.parametrize(
    ("kind", "outputs", "dtype"),
    [
        long(SOFTMAX, [0.0, 5.0, 7.0], jnp.bfloat16, id="softmax-bfloat16"),
        pytest.param(SOFTMAX, [0.0, 5.0, 7.0], jnp.float16, id="softmax-float16"),
        pytest.param(SIGMOID, [-7.0, 6.0], jnp.bfloat16, id="sigmoid-bfloat16"),
        long(SIGMOID, [-7.0, 6.0], jnp.float16, id="sigmoid-float16"),
    ],
)
def test_rare_labels_are_drawn_as_often_in_few_bits(kind: Any, outputs: list[float], dtype: Any) -> None:
    """Of 16 bits, noise has too few levels: a class of 8e-4 was never drawn, or eight times as often."""
    f, draws = jnp.array(outputs, dtype), 200_000
    keys = jax.random.split(jax.random.key(0), draws)
    squares = jax.vmap(lambda key: kind.sample(f, key).astype(jnp.float32) ** 2)(keys)
    p = jax.nn.softmax(jnp.array(outputs)) if kind is SOFTMAX else jax.nn.sigmoid(jnp.array(outputs))
    np.testing.assert_allclose(squares.mean(0), p * (1 - p), rtol=0.25)
