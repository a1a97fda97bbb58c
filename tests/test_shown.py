"""What prints of hyperparameters and hypergradients: numbers, in a line, and never an error."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hypergrad as hg


HYPERS = {
    "rate": hg.positive(hg.PerStep(jnp.array([1.0, 2.0, 4.0]))),
    "momentum": hg.bounded(0.875, 0.75, 1.0),
    "l2": hg.positive({"w": jnp.ones((2, 3)), "b": 2.0}),
    "few": hg.knots(jnp.array([0.0, 1.0]), 10),
    "shape": hg.PerStep(jnp.ones((4, 2))),
    "kept": hg.fixed(0.25),
    "free": jnp.float32(0.5),
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rate", "positive(unconstrained PerStep(3 steps, 0 to 1.386, norm 1.55))"),
        ("momentum", "bounded(unconstrained 0, 0.75..1)"),
        ("l2", "positive(unconstrained {'b': 0.693147, 'w': [2, 3], 0 to 0, norm 0})"),
        ("few", "knots([2], 0 to 1, norm 1; linear, over 10 steps)"),
        ("shape", "PerStep(4 steps of [2], 1 to 1, norm 2.828)"),
        ("kept", "fixed(0.25)"),
    ],
)
def test_numbers_are_shown(name: str, text: str) -> None:
    assert repr(HYPERS[name]) == text
    assert str(HYPERS[name]) == repr(HYPERS[name])


def test_a_hypergradient_shows_numbers() -> None:
    train_fn = lambda h, key: jnp.sum(h["rate"].values) * h["free"] + h["momentum"]  # noqa: E731
    _, grads = hg.hypergradient(train_fn, lambda v: v, {k: HYPERS[k] for k in ("rate", "momentum", "free")})
    assert repr(grads["rate"]) == "positive(unconstrained PerStep(3 steps, 0.5 to 2, norm 2.291))"
    assert repr(grads["momentum"]) == "bounded(unconstrained 0.0625, 0.75..1)"
    assert "PerStep(3 steps, 0.5 to 2" in repr(grads)
    assert repr(hg.SGD(hg.PerStep(jnp.ones(5)), 0.9)).count("PerStep(5 steps, 1 to 1, norm 2.236)") == 1


def test_what_has_no_numbers_prints_all_the_same() -> None:
    texts = []

    @jax.jit
    def traced(hypers):
        texts.append(repr(hypers))
        return hypers

    traced(HYPERS)
    jax.eval_shape(traced, HYPERS)
    jax.vmap(traced)({"a": hg.PerStep(jnp.ones((2, 3)))})
    assert "PerStep(float32 3 steps)" in texts[0] and "bounded(unconstrained float32 [], 0.75..1)" in texts[0]
    shapes = jax.eval_shape(lambda: HYPERS)
    for tree in (shapes, eqx.filter(HYPERS, eqx.is_inexact_array, inverse=True), jax.tree.map(lambda _: None, HYPERS)):
        assert "positive(" in repr(tree)
    keys = jax.random.split(jax.random.key(0), 3)
    some = (
        jnp.zeros((0,)),
        jnp.zeros((0, 3)),
        jnp.array([jnp.nan, jnp.inf]),
        keys,
        jnp.ones(3, jnp.bfloat16),
        jnp.ones(2) * 1j,
    )
    for values in (*some, np.array(["a"]), None, object(), True, 1 + 2j, jax.tree.structure(1)):
        assert repr(hg.PerStep(values)).startswith("PerStep(")
    gone = jnp.ones(3)
    gone.delete()
    assert "float32" in repr(hg.PerStep(gone))


def test_trees_are_as_before() -> None:
    leaves, tree = jax.tree.flatten(HYPERS)
    assert jax.tree.structure(jax.tree.unflatten(tree, leaves)) == tree
    assert hash(jax.tree.structure(hg.positive(1.0))) == hash(jax.tree.structure(hg.positive(2.0)))
