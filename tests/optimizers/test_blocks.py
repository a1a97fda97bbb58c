"""One chain for each block: rules that differ by leaf, that mix the entries of a matrix, that see more than the gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, of_bits, some_of
from matrix_rules import BRANCHING, Muon, PerExample, Shampoo, Whitened

import hypergrad as hg
from experiments import _quick


STEPS = 12
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(8, 4)), rng.normal(size=(8, 3))
WEIGHTS = {"b": rng.normal(size=5) / 3, "k": rng.normal(size=(3, 5)) / 3, "w": rng.normal(size=(4, 5)) / 2}


def loss(w: Any, theta: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ w["w"] + w["b"]) @ w["k"].T - y) ** 2) + theta * jnp.sum(w["w"] ** 2)


def paired(w: Any, theta: Any, batch: Any) -> Any:
    """With the variance of its hidden layer beside it."""
    return loss(w, theta, batch), {"spread": jnp.var(jnp.tanh(batch[0] @ w["w"] + w["b"]))}


def differentiated(optimizer: Any, adjoint: Any, function: Any = loss, dtype: Any = jnp.float64, **options: Any) -> Any:
    """Derivatives of something made of all that training gives, in all that goes in."""
    params, data = jax.tree.map(lambda x: jnp.asarray(x, dtype), (WEIGHTS, (X, Y)))

    def value(optimizer: Any, params: Any, theta: Any) -> Any:
        run = hg.train(
            function, params, optimizer, hg.full_batch(data), theta=theta, steps=STEPS, adjoint=adjoint, **options
        )
        leaves = jax.tree.leaves((run.params, run.state, run.statistics))
        return sum(jnp.sum(jnp.sin(x)) for x in leaves) + jnp.sum(jnp.cos(run.losses))

    optimizer = jax.tree.map(lambda x: jnp.asarray(x, dtype), optimizer)
    quick = _quick.OPTIONS if isinstance(adjoint, hg.Unrolled) else None  # an oracle need not have the bits of anything
    return jax.jit(jax.grad(value, (0, 1, 2)), compiler_options=quick)(optimizer, params, jnp.asarray(0.01, dtype))


def assert_agree(optimizer: Any, function: Any = loss, tolerance: float = 1e-9, **options: Any) -> None:
    with jax.enable_x64(True):
        found, expected = (differentiated(optimizer, a, function, **options) for a in (hg.Reversible(), hg.Unrolled()))
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
            scale = max(float(jnp.max(jnp.abs(y))), 1e-6)
            np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))


MATRICES = {"b": "rest", "k": "matrix", "w": "matrix"}


@pytest.mark.long
@of_bits("name", BRANCHING, "odd")
def test_a_rule_may_tell_leaves_apart(name: str) -> None:
    assert_agree(BRANCHING[name]())


def by_name(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "tall" if path[-1].key in "bw" else "odd", params)


def by_order(params: Any) -> Any:
    leaves, tree = jax.tree.flatten(params)
    return tree.unflatten(["odd", "tall", "odd"][: len(leaves)])


@pytest.mark.long
@pytest.mark.of_bits
@some_of("labels", [by_name, by_order], by_name)
def test_rules_that_tell_leaves_apart_may_stand_beside_each_other_by_name_and_order(labels: Any) -> None:
    assert_agree(hg.partition({name: BRANCHING[name]() for name in ("tall", "odd")}, labels))


@pytest.mark.of_bits
@pytest.mark.parametrize(
    "optimizer",
    [
        long(hg.partition({"matrix": Muon(0.02), "rest": hg.AdamW(0.01)}, MATRICES)),
        long(hg.partition({"matrix": Shampoo(0.02), "rest": hg.SGD(0.1)}, MATRICES)),
        long(hg.clip_by_global_norm(
            hg.partition({"matrix": Muon(0.02), "rest": hg.clip(hg.Adam(0.01), 0.1)}, MATRICES), 0.5
        )),
        hg.partition({"a": hg.SGD(0.1), "b": hg.partition({"c": hg.Adam(0.01), "d": hg.HeavyBall(0.01)}, "d")}, {
            "b": "a", "k": "b", "w": "a",
        }),
        long(hg.add_decayed_weights(hg.partition({"a": hg.SGD(0.1), "b": hg.SGD({"b": None, "k": 0.2, "w": 0.1})}, {
            "b": "a", "k": "b", "w": "b",
        }), 0.01)),
        long(hg.freeze(hg.partition({"x": hg.SGD(0.1), "y": hg.AdamW(0.01)}, {"b": "x", "k": "y", "w": "y"}), {
            "b": False, "k": True, "w": False,
        })),
    ],
    ids=["muon and adamw", "shampoo and sgd", "clipped", "nested", "decayed", "frozen"],
)  # fmt: skip
def test_rules_that_differ_by_leaf(optimizer: Any) -> None:
    assert_agree(optimizer, tolerance=1e-8)


@pytest.mark.long
@pytest.mark.of_bits
def test_a_rule_sees_more_than_the_gradient() -> None:
    """The second moment of the gradients of examples, a function of the old parameters and the batch."""
    assert_agree(PerExample(0.02))


@pytest.mark.long
@pytest.mark.of_bits
@pytest.mark.parametrize("rule", [long(Whitened(0.1), id="plain"), pytest.param(hg.clip(Whitened(0.1), 0.2), id="clipped")])
def test_a_rule_reads_what_statistics_come_to(rule: Any) -> None:
    """They move first, and are undone last."""
    with jax.enable_x64(True):
        assert_agree(rule, paired, statistics=hg.Statistics({"spread": jnp.float64(0.3)}, 0.9))


@pytest.mark.long
def test_labels_by_a_function_of_the_parameters() -> None:
    by_shape = lambda w: jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "rest", w)  # noqa: E731
    rules = {"matrix": Muon(0.02), "rest": hg.AdamW(0.01)}
    one, other = (
        differentiated(hg.partition(rules, labels), hg.Reversible(), dtype=jnp.float32) for labels in (MATRICES, by_shape)
    )
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.long
def test_a_partition_of_one_rule_is_the_rule() -> None:
    data = hg.full_batch((jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), WEIGHTS)
    plain, parted = (
        hg.train(loss, params, optimizer, data, theta=0.0, steps=STEPS)
        for optimizer in (hg.Adam(0.01), hg.partition({"all": hg.Adam(0.01)}, "all"))
    )
    for x, y in zip(
        jax.tree.leaves((plain.params, plain.losses)), jax.tree.leaves((parted.params, parted.losses)), strict=True
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.long
def test_a_state_goes_on() -> None:
    """Links that a leaf does not have are None; weights of means are under their labels."""
    data = hg.full_batch((jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), WEIGHTS)
    optimizer = hg.partition({"matrix": Muon(0.02), "rest": hg.AdamW(0.01)}, MATRICES)
    whole = hg.train(loss, params, optimizer, data, theta=0.0, steps=12)
    half = hg.train(loss, params, optimizer, data, theta=0.0, steps=7)
    assert half.state["momentum"]["b"] is None and half.state["mean"]["w"] is None
    assert list(half.state["mean_weight"]) == ["rest"]
    rest = hg.train(loss, half.params, optimizer, data, theta=0.0, steps=5, state=half.state)
    for x, y in zip(jax.tree.leaves((whole.params, whole.state)), jax.tree.leaves((rest.params, rest.state)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hg.partition({}, "a"), "`rules` must be a dict {label: optimizer}"),
        (lambda: hg.partition({"a": 0.1}, "a"), "rules\\['a'\\] must be an optimizer such as hg.SGD"),
        (lambda: hg.partition({"a": hg.SGD(0.1)}, {}), "`labels` must be a pytree prefix of the parameters with keys"),
    ],
)
def test_what_is_no_partition(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("c", "the label of params\\['b'\\] is 'c', for which there is no rule; `rules` has \\['a'\\]"),
        ({"w": "a"}, "`labels` must be a pytree prefix of `params` with labels as leaves"),
    ],
)
def test_labels_that_do_not_fit(labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hg.train(loss, WEIGHTS_32, hg.partition({"a": hg.SGD(0.1)}, labels), hg.full_batch((X, Y)), theta=0.0, steps=2)


WEIGHTS_32 = jax.tree.map(lambda x: np.asarray(x, np.float32), WEIGHTS)


def test_a_signal_of_another_shape() -> None:
    class Wrong(PerExample):
        signals = {"squares": lambda loss, params, theta, batch, key: {"w": params["w"]}}

    with pytest.raises(ValueError, match="the signal 'squares' of the optimizer must be a pytree like `params`"):
        hg.train(loss, WEIGHTS_32, Wrong(0.1), hg.full_batch((X, Y)), theta=0.0, steps=2)


def test_a_signal_that_nobody_makes() -> None:
    from hypergrad.optimizers import Link, Optimizer

    with pytest.raises(TypeError, match="link `v`: there is no signal 'variance'"):

        class Blind(Optimizer):
            chain = (Link("v", lambda h, z, g: g, signal="variance"), Link("params", lambda h, z: z.v))


def test_labels_that_do_not_sort_are_told() -> None:
    with pytest.raises(TypeError, match="labels in `rules` must be of one kind, strings for instance.* got \\['x', 1\\]"):
        hg.partition({"x": hg.SGD(0.1), 1: hg.SGD(0.2)}, {"a": "x", "b": 1})
