"""Leaves whose hyperparameters differ, in one block: which are, that every road agrees on them, and that nothing mixes."""

import functools
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import fails

import hypergrad as hg
from experiments import _quick
from hypergrad.optimizers import Link, block, lay_out, side_by_side
from hypergrad.optimizers.transform import Transformed


STEPS = 6
SHAPES: dict[str, tuple[int, ...]] = {"a": (4,), "b": (2, 2), "c": (4,), "d": (2,), "e": (2,), "w": (10, 10)}
ROW = hg.PerStep(jnp.full(STEPS, 0.1))
TOGETHER = ((("a",), ("b",), ("c",)), (("d",), ("e",)), (("w",),))
APART = tuple(((name,),) for name in SHAPES)
ALL = ((("a", "b", "c", "d", "e"),), (("w",),))


def params(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def each(*values: Any) -> dict[str, Any]:
    """One for each leaf."""
    return dict(zip(SHAPES, values, strict=True))


DIFFERENT = each(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
ROWS = {name: hg.PerStep(jnp.linspace(x, 0.1, STEPS)) for name, x in DIFFERENT.items()}


class First(hg.SGD):
    """Takes the first number for the rate of all, as one of a leaf is."""

    entrywise = True
    chain = (
        Link("velocity", lambda h, z, g: -g, decay="momentum"),
        Link("params", lambda h, z: h.learning_rate.reshape(-1)[0] * z.velocity),
    )


class FirstBound(Transformed):
    """Likewise, of the bound around a rule."""

    bound: Any = 1.0
    entrywise_transform = True

    @staticmethod
    def transform(h: Any, w: Any, g: Any) -> Any:
        return [x * hj.bound.reshape(-1)[0] for hj, x in zip(h, g, strict=True)]


class Begun(hg.SGD):
    """What it begins with looks at all that a hyperparameter holds."""

    entrywise = True

    def begin(self, h: Any, z: Any) -> Any:
        return super().begin(h, z)


class Prepared(hg.SGD):
    """Its preparation may look at all that a hyperparameter holds."""

    entrywise = True

    def prepare(self, h: Any, steps: int) -> Any:
        return super().prepare(h, steps)


@pytest.mark.parametrize(
    ("optimizer", "parts"),
    [
        (hg.SGD(DIFFERENT), TOGETHER),
        (hg.SGD(ROWS), TOGETHER),
        (hg.SGD(DIFFERENT, dict.fromkeys(SHAPES, 0.5)), TOGETHER),
        (hg.Adam(DIFFERENT, eps={**DIFFERENT, "b": 0.1}), TOGETHER),
        (hg.clip(hg.SGD(0.1), DIFFERENT), TOGETHER),
        (hg.SGD(0.1), ALL),
        (hg.SGD(each(0.1, 0.1, 0.2, 0.3, 0.4, 0.5)), ((("a", "b"),), (("c",),), (("d",), ("e",)), (("w",),))),
        (hg.SGD(each(0.1, 0.2, 0.1, 0.2, 0.2, 0.5)), ((("a", "c"), ("b", "d", "e")), (("w",),))),
        (hg.SGD({**DIFFERENT, "b": ROW}), ((("a",), ("c",)), (("b",),), *TOGETHER[1:])),
        (hg.SGD({**DIFFERENT, "b": jnp.full((2, 2), 0.2)}), ((("a",), ("c",)), (("b",),), *TOGETHER[1:])),
        (hg.SGD(0.1, DIFFERENT), APART),
        (hg.SGD(ROWS, DIFFERENT), APART),
        (hg.AdamW(DIFFERENT), APART),
        (Prepared(DIFFERENT), APART),
        (Begun(DIFFERENT), APART),
        (First(DIFFERENT), APART),
        (FirstBound(hg.SGD(0.1), DIFFERENT), APART),
    ],
    ids=str,
)
def test_parts_of_one_size_whose_numbers_differ_lie_in_one_block(optimizer: Any, parts: Any) -> None:
    out = lay_out.lay_out(optimizer, params(), STEPS, None, None, unbounded=False)
    names = list(SHAPES)
    assert [tuple(tuple(names[i] for i in part) for part in b.parts) for b in out.blocks] == list(parts)


def loss(p: Any, theta: Any, x: Any) -> Any:
    """Each leaf has an optimum of its own, and all are coupled."""
    parts = [jnp.sum(jnp.cos(v - x * (i + 1))) for i, v in enumerate(p.values())]
    return sum(parts) + theta * sum(parts[:-1]) ** 2 / 20


def derivatives(optimizer: Any, adjoint: Any, **options: Any) -> Any:
    """What training comes to, and the derivatives of something made of all of it in all that goes in."""
    data = jnp.asarray(np.random.default_rng(1).normal(size=STEPS))

    def value(optimizer: Any, p: Any, theta: Any) -> Any:
        run = hg.train(loss, p, optimizer, hg.stacked(data), theta=theta, adjoint=adjoint, **options)
        leaves = jax.tree.leaves((run.params, run.state))
        return sum(jnp.sum(jnp.sin(x * (i + 1))) for i, x in enumerate(leaves)) + jnp.sum(jnp.cos(run.losses)), run

    found = jax.value_and_grad(value, (0, 1, 2), has_aux=True)
    quick = _quick.OPTIONS if isinstance(adjoint, hg.Unrolled) else None  # an oracle need not have the bits of anything
    (_, run), gradients = jax.jit(found, compiler_options=quick)(optimizer, params(jnp.float64), jnp.float64(0.3))
    return gradients, (run.params, run.state, run.losses)


def assert_close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))


def floats(tree: Any) -> Any:
    return jax.tree.map(jnp.float64, tree)


RULES: dict[str, Any] = {
    "SGD": lambda: hg.SGD(floats(DIFFERENT), 0.7),
    "rows": lambda: hg.SGD(floats(ROWS), 0.7),
    "Adam": lambda: hg.Adam(floats(DIFFERENT), eps=floats({**DIFFERENT, "b": 0.1})),
    "RMSProp": lambda: hg.RMSProp(floats(DIFFERENT), decay=0.8, momentum=0.5),
    "clipped": lambda: hg.clip(hg.SGD(floats(ROWS), 0.7), floats(DIFFERENT)),
    "decayed": lambda: hg.add_decayed_weights(hg.clip_by_global_norm(hg.SGD(0.2, 0.7), 2.0), floats(DIFFERENT)),
    "partition": lambda: hg.partition({"a": hg.SGD(floats(DIFFERENT), 0.7), "b": hg.Adam(0.1)}, each(*"aaaabb")),
}


@some_of("name", RULES, "SGD", "clipped")
def test_reversible_is_unrolled(name: str) -> None:
    with jax.enable_x64(True):
        made = RULES[name]()
        assert any(len(b.parts) > 1 for b in lay_out.lay_out(made, params(), STEPS, None, None, unbounded=False).blocks)
        assert_close(*(derivatives(made, adjoint) for adjoint in (hg.Reversible(), hg.Unrolled())))


@some_of("name", RULES, "rows", "decayed")
def test_it_changes_nothing_but_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number for each leaf, a block for each leaf."""
    with jax.enable_x64(True):
        together = derivatives(RULES[name](), hg.Reversible())
        monkeypatch.setattr(side_by_side, "LARGE", -1.0)
        assert_close(together, derivatives(RULES[name](), hg.Reversible()))


@some_of("name", ("SGD", "Adam", "RMSProp", "partition"), "Adam")
def test_a_run_goes_on_from_its_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True):
        run = functools.partial(hg.train, loss, optimizer=RULES[name](), batches=hg.full_batch(0.5), theta=0.3, steps=STEPS)
        first = run(params(jnp.float64))
        together = derivatives(RULES[name](), hg.Reversible(), state=first.state)
        monkeypatch.setattr(side_by_side, "LARGE", -1.0)
        assert_close(together, derivatives(RULES[name](), hg.Reversible(), state=first.state))


@pytest.mark.long
def test_steps_from_python_agree() -> None:
    with jax.enable_x64(True):
        p, made = params(jnp.float64), RULES["clipped"]()
        run = lambda adjoint: hg.train(loss, p, made, hg.full_batch(0.5), theta=0.3, steps=STEPS, adjoint=adjoint)  # noqa: E731
        value = lambda driver: run(hg.Reversible(driver=driver)).params  # noqa: E731
        assert_close(value("host"), value("scan"))


@pytest.mark.long
def test_microbatches_are_added_in_any_order() -> None:
    """Each rate's hypergradient is a sum over its part alone."""
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(STEPS, 4)))
    mean = lambda p, theta, x: jnp.mean(jax.vmap(lambda one: loss(p, theta, one))(x))  # noqa: E731

    def value(rates: Any, k: int | None, adjoint: Any) -> Any:
        options: Any = {"theta": jnp.float64(0.3), "adjoint": adjoint, "microbatches": k}
        run = hg.train(mean, params(jnp.float64), hg.SGD(rates, 0.7), hg.stacked(rows), **options)
        return sum(jnp.sum(jnp.sin(x * (i + 1))) for i, x in enumerate(run.params.values()))

    with jax.enable_x64(True):
        rates = floats(DIFFERENT)
        found = jax.grad(value)(rates, 2, hg.Reversible())
        assert_close(found, jax.grad(value)(rates, None, hg.Unrolled()))


@pytest.mark.long
def test_each_member_of_a_batch_has_its_own() -> None:
    scales = jnp.linspace(0.5, 1, 3)

    def value(scale: Any) -> Any:
        made = hg.SGD({name: x * scale for name, x in DIFFERENT.items()}, 0.7)
        run = hg.train(loss, params(), made, hg.full_batch(0.5), theta=0.3, steps=STEPS)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(run.params))

    one = jax.value_and_grad(value)
    assert_close(jax.vmap(one)(scales), jax.tree.map(lambda *x: jnp.stack(x), *map(one, scales)), 1e-4)


@pytest.mark.parametrize("leaf", ["a", long("b"), "c", long("e")])
def test_an_error_names_the_leaf(leaf: str) -> None:
    far = lambda p, *_: sum(jnp.sum(x) for x in p.values()) + 1e9 * jnp.sum(p[leaf])  # noqa: E731
    with fails(hg.RangeError, f"velocity['{leaf}'] left the range of its fixed-point grid at step 0"):
        hg.train(far, params(), hg.SGD(DIFFERENT, 0.7), hg.full_batch(0.0), steps=STEPS)


def test_dtypes_and_rules_do_not_share_a_block() -> None:
    narrow = {name: x.astype(jnp.bfloat16) if name in "bd" else x for name, x in params().items()}
    rules = {"x": hg.SGD(DIFFERENT), "y": hg.SGD(DIFFERENT)}
    labels = each(*"xyxyyy")
    expected = [((0,), (2,)), ((1,),), ((3,),), ((4,),), ((5,),)]
    for made, p in ((hg.SGD(DIFFERENT), narrow), (hg.partition(rules, each(*"xyxyxx")), params())):
        out = lay_out.lay_out(made, p, STEPS, None, None, unbounded=False)
        assert [b.parts for b in out.blocks] == expected
    out = lay_out.lay_out(hg.partition(rules, labels), params(), STEPS, None, None, unbounded=False)
    assert [b.parts for b in out.blocks] == [*expected[:2], ((3,), (4,)), expected[-1]]


SMALL = st.sampled_from([(0,), (1,), (2,), (1, 2), (4,), (2, 2)])


@example([((2,), 1, 0.5), ((2,), 2, 0.5), ((2,), 1, 0.75), ((2,), 3, 0.75)])  # two blocks whose first rates are one
@given(st.lists(st.tuples(SMALL, st.integers(1, 4), st.sampled_from([0.5, 0.75])), max_size=40))
@settings(deadline=None, max_examples=100)
def test_the_leaves_of_a_part_have_one_hyperparameter_and_parts_one_size(leaves: list[tuple[Any, int, float]]) -> None:
    values = [*(jnp.zeros(shape) for shape, _, _ in leaves), jnp.zeros(100)]
    rates, momenta = ([*(own[k] for own in leaves), 0.25] for k in (1, 2))
    made = hg.SGD(list(map(float, rates)), momenta)
    out = lay_out.lay_out(made, values, STEPS, None, None, unbounded=False)
    assert sorted(i for b in out.blocks for i in b.leaves) == list(range(len(values)))
    for own, h in zip(out.blocks, out.h, strict=True):
        for name, expected in (("learning_rate", rates), ("momentum", momenta)):
            seen = own.split(jnp.broadcast_to(h[name][0], own.shape))
            for i, x in zip(own.leaves, seen, strict=True):
                assert x.shape == values[i].shape and (x == expected[i]).all()


@pytest.mark.parametrize(("count", "size", "apart"), [(33, 3, True), (32, 3, False), (33, 1025, False)])
def test_many_small_leaves_are_split_apart(count: int, size: int, apart: bool) -> None:
    out = lay_out.lay_out(hg.SGD(0.1), [jnp.zeros(size)] * count, STEPS, None, None, unbounded=False)
    assert [b.split_apart for b in out.blocks] == [apart]


@pytest.mark.of_bits
def test_split_apart_every_road_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "MANY", 1)
    with jax.enable_x64(True):
        made = hg.RMSProp({name: 0.9 * x for name, x in floats(DIFFERENT).items()}, decay=0.8, momentum=0.5)
        out = lay_out.lay_out(made, params(), STEPS, None, None, unbounded=False)
        assert [b.split_apart for b in out.blocks] == [True, True, False]
        assert_close(*(derivatives(made, adjoint) for adjoint in (hg.Reversible(), hg.Unrolled())))


@pytest.mark.parametrize(
    ("small", "rates"),
    [("c", DIFFERENT), long("e", DIFFERENT), ("bde", each(0.1, 0.2, 0.1, 0.2, 0.2, 0.5)), ("", DIFFERENT)],
)
def test_updates_too_small_for_the_grid_are_told_of_the_part_that_has_them(
    small: str, rates: Any, tmp_path: pathlib.Path
) -> None:
    """By its first leaf, and though those of the leaves beside it are large enough."""
    size = {name: 1e-6 if name in small else 1.0 for name in SHAPES}
    slow = lambda p, _, x: sum(jnp.sum((v - x) ** 2) * size[name] for name, v in p.items())  # noqa: E731
    rates = {name: x / (10 * size[name]) for name, x in rates.items()}
    start = jax.tree.map(lambda x: jnp.full_like(x, 1.5), params())
    expected = [f"velocity['{small[0]}'] is too small for its fixed-point grid"] if small else []
    made, batches = hg.SGD(rates, 0.9), hg.full_batch(1.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        record = hg.record(slow, start, made, batches, steps=20, folder=tmp_path)
        record.resume(18, optimizer=made)  # by what each part had in the steps that were recorded
    assert [str(x.message).partition(":")[0] for x in told] == 2 * expected
