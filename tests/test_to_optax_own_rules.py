"""`hg.to_optax` of rules of one's own, and what an update takes: a loop in floats is the run of a few weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import long

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer, Transformed


class Reads(Transformed):
    """A gradient that is damped where its mean is large."""

    reads = ("mean",)
    entrywise_transform = True

    @staticmethod
    def transform(h: Any, w: Any, g: Any, z: Any) -> Any:
        return [x / (1 + zj.mean**2) for x, zj in zip(g, z, strict=True)]


class Plain(Optimizer):
    """w <- w - a g, whose `prepare` looks at one step alone."""

    learning_rate: Any
    chain = (Link("params", lambda h, z, g: -h.learning_rate * h.c * g),)
    by_step = True

    def prepare(self, h: Any, steps: int) -> Any:
        return {**h, "c": jnp.ones(1)}


class Harmonic(Plain):
    """Another `prepare`, which says nothing of itself."""

    def prepare(self, h: Any, steps: int) -> Any:
        return {**h, "c": 1 / (1.0 + jnp.arange(steps))}


class Doubled(hg.HeavyBall):
    """Longer steps where a run goes on from a state."""

    def begin(self, h: Any, z: Any) -> Any:
        return {**h, "learning_rate": 2 * h["learning_rate"]}


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: Reads(hg.clip_by_global_norm(hg.AdamW(0.1, 0.5), 0.3)), None),
        (lambda: hg.with_gradient_link(Harmonic(0.5), bits=16), 3),
        (lambda: Doubled(0.1, 0.5), None),
        long(lambda: hg.Adam(0.1, hg.PerStep(jnp.array([0.1, 0.9, 0.9]))), None),
    ],
    ids=[
        "a transformation that reads links",
        "a link around many steps",
        "a rule that begins otherwise",
        "decays that jump",
    ],
)
def test_so_has_a_loop_of_few_weights(make: Any, steps: Any) -> None:
    params, rule = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[0.5], [0.1]])}, hg.to_optax(make(), steps)
    slope = lambda w: jax.tree.map(lambda x: x - 0.1, w)  # noqa: E731
    loss = lambda w, _, x: sum(jnp.sum((v - 0.1) ** 2) for v in jax.tree.leaves(w)) / 2  # noqa: E731
    w, state = params, rule.init(params)
    for _ in range(3):
        updates, state = jax.jit(rule.update)(slope(w), state, w)
        w = optax.apply_updates(w, updates)
    run = hg.train(loss, params, make(), hg.full_batch(0.0), steps=3)
    for key, x in run.params.items():
        np.testing.assert_allclose(w[key], x, atol=1e-5)


def test_a_link_around_a_rule_without_prepare_needs_no_steps() -> None:
    class Bare(Optimizer):
        learning_rate: Any
        chain = (Link("params", lambda h, z, g: -h.learning_rate * g),)

    rule = hg.to_optax(hg.with_gradient_link(Bare(0.5), bits=16))
    updates, _ = rule.update(jnp.ones(2), rule.init(jnp.ones(2)), jnp.ones(2))
    np.testing.assert_allclose(updates, -0.5, rtol=1e-4)


@pytest.mark.parametrize(
    ("gradients", "text"),
    [
        (lambda p: {"q": p["w"], "r": p["z"]}, "gradients must have the tree of `params`"),
        (
            lambda p: p | {"w": p["w"].T},
            r"gradients\['w'\] must be real, of the parameter's shape \(2, 3\); got float32\[3, 2\]",
        ),
        (lambda p: p | {"z": None}, r"gradients\['z'\] must be real.*got NoneType"),
        (lambda p: None, "gradients must have the tree of `params`"),
    ],
)
def test_gradients_are_like_the_parameters(gradients: Any, text: str) -> None:
    params, rule = {"w": jnp.ones((2, 3)), "z": jnp.ones(6)}, hg.to_optax(hg.HeavyBall(1.0, 0.5))
    with pytest.raises(ValueError, match=text):
        rule.update(gradients(params), rule.init(params), params)


def test_a_parameter_may_be_a_number() -> None:
    rule = hg.to_optax(hg.HeavyBall(0.5, 0.5))
    updates, _ = rule.update(1.0, rule.init(0.5), 0.5)
    np.testing.assert_allclose(updates, -0.5)
