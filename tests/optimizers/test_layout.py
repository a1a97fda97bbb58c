"""Leaves laid side by side: which are, that nothing comes out otherwise, and that errors still know the leaf."""

from typing import Any

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long
from hypothesis import given, settings
from hypothesis import strategies as st

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer
from hypergrad.optimizers.block import Block
from hypergrad.optimizers.lay_out import lay_out
from hypergrad.optimizers.partition import layers_of


STEPS = 6


def blocks_of(optimizer: Optimizer, params: Any) -> list[Block]:
    return lay_out(optimizer, params, STEPS, None, None, unbounded=False).blocks


def groups_of(optimizer: Optimizer, params: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(block.leaves for block in blocks_of(optimizer, params))


@given(
    st.lists(
        st.tuples(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), st.integers(0, 2)),
        min_size=1,
        max_size=6,
    )
)
@settings(deadline=None, max_examples=50)
def test_split_undoes_join(leaves: list[tuple[tuple[int, ...], int]]) -> None:
    values = [
        jnp.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) + 100.0 * i) for i, (shape, _) in enumerate(leaves)
    ]
    blocks = blocks_of(hg.SGD([float(1 + key) for _, key in leaves]), values)
    assert sorted(i for block in blocks for i in block.leaves) == list(range(len(leaves)))
    for block in blocks:
        vector = block.join(values)
        assert vector.shape == block.shape and vector.ndim == (1 if len(block.parts) == 1 else 2)
        for i, x in zip(block.leaves, block.split(vector), strict=True):
            np.testing.assert_array_equal(x, values[i])
        np.testing.assert_array_equal(block.joined(block.split(vector)), vector)


WEIGHTS = {"a": jnp.ones(3), "b": jnp.ones((40, 40)), "c": jnp.ones((2, 5)), "d": jnp.ones(())}
RATES = {"a": 0.1, "b": 0.2, "c": 0.1, "d": 0.3}


class Separate(hg.SGD):
    """Without saying that it is entrywise."""

    entrywise = False


@pytest.mark.parametrize(
    ("optimizer", "groups"),
    [
        (hg.SGD(0.1), ((0, 2, 3), (1,))),
        (hg.SGD(hg.PerStep(jnp.full(STEPS, 0.1)), jnp.float32(0.9)), ((0, 2, 3), (1,))),
        (hg.SGD(hg.knots(jnp.full(2, 0.1), STEPS)), ((0, 2, 3), (1,))),
        (hg.SGD(RATES), ((0, 2), (1,), (3,))),
        (hg.SGD(jax.tree.map(jnp.float32, RATES)), ((0,), (1,), (2,), (3,))),
        (hg.SGD(0.1, {**RATES, "c": jnp.full((2, 5), 0.5)}), ((0,), (1,), (2,), (3,))),
        (hg.SGD(jax.tree.map(jnp.ones_like, WEIGHTS)), ((0,), (1,), (2,), (3,))),
        (hg.freeze(hg.SGD(0.1), {"a": False, "b": False, "c": True, "d": False}), ((0, 3), (1,), (2,))),
        (hg.clip_by_global_norm(hg.Adam(0.1), 1.0), ((0, 2, 3), (1,))),
        (Separate(0.1), ((0,), (1,), (2,), (3,))),
        (hg.clip(Separate(0.1), 1.0), ((0,), (1,), (2,), (3,))),
    ],
)
def test_small_leaves_of_the_same_hyperparameters_are_side_by_side(optimizer: Optimizer, groups: Any) -> None:
    assert groups_of(optimizer, WEIGHTS) == groups


def test_what_blocks_have_in_common_is_prepared_once() -> None:
    params = {name: jnp.ones(16, dtype) for name, dtype in [("a", "float32"), ("b", "float32"), ("c", "float16")]}
    asked = []

    class Counted(hg.Adam):
        entrywise = False

        def prepare(self, h: Any, steps: int) -> Any:
            asked.append(h)
            return super().prepare(h, steps)

    def h_of(rate: Any) -> list[Any]:
        asked.clear()
        return lay_out(Counted(rate, hg.PerStep(jnp.full(STEPS, 0.5))), params, STEPS, None, None, unbounded=False).h

    a, b, c = h_of(jnp.float32(0.1))
    assert len(asked) == 1 and all(a[key] is x for own in (b, c) for key, x in own.items())
    a, b, _ = h_of({"a": 0.1, "b": 0.2, "c": 0.1})
    assert len(asked) == 2 and a["learning_rate"] is not b["learning_rate"] and a["b1"] is b["b1"]
    with jax.enable_x64(True):
        params["b"] = jnp.ones(16, "float64")
        a, b, _ = h_of(0.1)
        assert len(asked) == 2 and (a["b1"].dtype, b["b1"].dtype) == (jnp.float32, jnp.float64)
    params |= {"a": jnp.ones((4, 4)), "b": jnp.ones(16)}
    assert [own["b1"].ndim for own in h_of(0.1)][:2] == [3, 2]


def test_a_rule_that_may_look_at_shapes_sees_them() -> None:
    leaves = jax.tree.leaves(WEIGHTS)
    assert [block.shape for block in blocks_of(Separate(0.1), WEIGHTS)] == [x.shape for x in leaves]


def test_dtypes_are_not_mixed() -> None:
    narrow = {**WEIGHTS, "d": jnp.ones((), jnp.bfloat16)}
    assert groups_of(hg.SGD(0.1), narrow) == ((0, 2), (1,), (3,))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda rate: hg.AdamW(hg.PerStep(0.1 * rate)),
    "clipped": lambda rate: hg.clip_by_global_norm(hg.SGD(hg.PerStep(rate), 0.8), 0.5),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("adjoint", "name"),
    [pytest.param(hg.Reversible(), "clipped", marks=pytest.mark.of_bits), long(hg.Unrolled(), "adamw")],
    ids=str,
)
def test_the_layout_changes_nothing_but_rounding(name: str, adjoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    shapes = {"w": (30, 4), "scale": (4,), "shift": (4,), "v": (4,)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    data, make = jnp.asarray(rng.normal(size=(STEPS, 5, 30)), jnp.float32), OPTIMIZERS[name]
    assert max(map(len, groups_of(make(jnp.ones(STEPS)), params))) > 1

    def loss(p: Any, _: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["w"] * p["scale"] + p["shift"]) @ p["v"] - 1) ** 2)

    def ours(rate: Any, params: Any) -> Any:
        done = hg.train(loss, params, make(rate), hg.stacked(data), adjoint=adjoint)
        return loss(done.params, None, data[0]) + sum(jnp.sum(x) for x in jax.tree.leaves(done.state)), done

    def all_of() -> Any:
        differentiated = jax.value_and_grad(lambda *a: ours(*a), (0, 1), has_aux=True)
        return jax.jit(differentiated)(jnp.linspace(0.1, 0.3, STEPS), params)

    (_, together), gradients = all_of()
    monkeypatch.setattr(type(layers_of(make(jnp.ones(1)), params)[-1].optimizer), "entrywise", False)
    (_, apart), expected = all_of()
    pairs = ((together.params, apart.params), (together.losses, apart.losses), (gradients, expected))
    for x, y in zip(*(jax.tree.leaves(column) for column in zip(*pairs, strict=True)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


@pytest.mark.long
def test_a_leaf_without_entries_trains_beside_others() -> None:
    """Though its decays and rates, one for each weight, are none."""
    params = {**WEIGHTS, "none": jnp.zeros((0, 2))}

    def value(rate: Any, b2: Any) -> Any:
        loss = lambda w, _, batch: sum(jnp.sum((x - 0.5) ** 2) for x in jax.tree.leaves(w))  # noqa: E731
        w = hg.train(loss, params, hg.Adam(rate, b2=b2), hg.full_batch(0.0), steps=STEPS).params
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(w))

    rate, b2 = (jax.tree.map(lambda x, y=y: jnp.full_like(x, y), params) for y in (0.1, 0.99))
    for gradient in jax.grad(value, (0, 1))(rate, b2):
        assert gradient["none"].shape == (0, 2)
        assert all(jnp.all(gradient[name] != 0) for name in WEIGHTS)


@pytest.mark.parametrize("leaf", [long("a"), "c", long("d")])
def test_an_error_names_the_leaf_and_not_the_vector(leaf: str) -> None:
    def loss(w: Any, _: Any, t: Any) -> Any:
        good = sum(jnp.sum(x**2) for x in jax.tree.leaves(w))
        return good + jnp.where(t == 3, 1e5, 0.0) * jnp.sum(w[leaf])

    with pytest.raises(hg.RangeError, match=rf"velocity\['{leaf}'\] left the range of its fixed-point grid at step 3"):
        hg.train(loss, WEIGHTS, hg.HeavyBall(0.01), lambda t: t, steps=STEPS)


@pytest.mark.long
def test_a_decay_out_of_range_names_a_leaf_that_has_it() -> None:
    def run(high: Any) -> Any:
        momentum = {"a": 0.5, "b": 0.5, "c": high, "d": high}
        return hg.train(lambda w, *_: jnp.sum(w["b"]), WEIGHTS, hg.SGD(0.1, momentum), hg.full_batch(0), steps=2).params

    with pytest.raises(Exception, match=r"optimizer.momentum for params\['c'\]` must be in \(0, 1\); got 1.5"):
        jax.block_until_ready(jax.jit(run)(1.5))


class Normed(Optimizer):
    """v <- m v - g / |g|;  w <- w + a v, which is not what it says of itself."""

    learning_rate: Any = 0.1
    momentum: Any = 0.9
    entrywise = True

    chain = (
        Link("velocity", lambda h, z, g: -g / (1 + jnp.linalg.norm(g)), decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


class Centered(hg.optimizers.transform.Transformed):
    """g <- g - mean(g), leaf by leaf."""

    entrywise_transform = True

    @staticmethod
    def transform(h: Any, w: Any, g: Any) -> Any:
        return [x - jnp.mean(x) for x in g]


class Summed(Normed):
    """A link of another shape than the parameters."""

    entrywise = True  # said again of another chain, since none inherits it

    chain = (
        Link("velocity", lambda h, z, g: -jnp.sum(g), decay="momentum", start=lambda w: jnp.zeros((), w.dtype)),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        long(
            Normed(),
            "Normed declares that it works entry by entry, but the increment of link `velocity` depends on what else",
        ),
        long(Summed(), "Summed declares that it works entry by entry, but the increment of link `velocity` depends"),
        (Centered(hg.SGD(0.1)), "Centered .* what it makes of a gradient depends on what else is in the leaf.*a mean over"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_rule_that_only_says_so_is_told(optimizer: Optimizer, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        hg.testing.check_optimizer(optimizer)


@pytest.mark.parametrize("decay", [{"w": 0.9, "none": 0.5}, long({"w": 0.9, "none": jnp.zeros((0, 3))})])
@pytest.mark.parametrize("rule", [hg.SGD, long(hg.Adam)])
def test_leaves_without_entries_train(rule: Any, decay: Any) -> None:
    loss = lambda p, _, batch: sum(jnp.sum((x - batch) ** 2) for x in jax.tree.leaves(p))  # noqa: E731
    for size in (2, 0):
        params = {"w": jnp.ones(size), "none": jnp.zeros((0, 3))}
        run = hg.train(loss, params, rule(0.1, decay), hg.full_batch(jnp.zeros(1)), steps=3)
        assert run.params["none"].shape == (0, 3) and bool((run.params["w"] < 1).all())


@pytest.mark.long
def test_an_array_that_two_leaves_share_does_not_lie_side_by_side() -> None:
    leaf, rates = jnp.array([0.5, -0.5, 1.0]), jnp.array([0.1, 0.2, 0.3])
    loss = lambda w, _, t: sum(jnp.sum((x - jnp.sin(t)) ** 2) for x in w.values()) / 2  # noqa: E731
    run = lambda w: hg.train(loss, w, hg.SGD(rates), lambda t: t, steps=5).params  # noqa: E731
    names = "abcdefghij"  # so many that each is small
    both = run(dict.fromkeys(names, leaf))
    for name in names:
        assert (both[name] == run({name: leaf})[name]).all()
