"""Schedule-Free AdamW is evaluated at the average of its iterates, and refuses what would make that another place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hypergrad as hg


PARAMS = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
BATCHES = hg.full_batch(jnp.zeros(1))


def loss(w: Any, _: Any, batch: Any) -> jax.Array:
    return sum(jnp.sum((x - 2) ** 2) for x in jax.tree.leaves(w)) / 2


def test_b1_is_the_same_at_all_steps() -> None:
    rule = hg.ScheduleFreeAdamW(0.1, b1=hg.PerStep(jnp.array([0.9, 0.6, 0.3])))
    with pytest.raises(ValueError, match="`b1` has a value for each of 3 steps.*Give one for all steps"):
        hg.train(loss, PARAMS, rule, BATCHES, steps=3)
    with pytest.raises(ValueError, match="`b1` has a value for each of 3 steps"):
        rule.averaged(PARAMS, {"base": PARAMS})


@pytest.mark.parametrize(
    ("b1", "of"),
    [
        ({"a": 0.5, "b": 0.75}, {"a": 0.5, "b": 0.75}),
        ({"a": jnp.array([0.5, 0.25]), "b": 0.75}, {"a": np.array([0.5, 0.25]), "b": 0.75}),
        (hg.knots(jnp.array([0.5]), 1), {"a": 0.5, "b": 0.5}),
        (hg.PerStep(jnp.array([0.5])), {"a": 0.5, "b": 0.5}),
        (hg.unit_interval(0.5), {"a": 0.5, "b": 0.5}),
    ],
    ids=["of each leaf", "of each weight", "knots", "per step", "in a domain"],
)
def test_the_average_takes_the_decay_of_its_own_leaf(b1: Any, of: dict[str, Any]) -> None:
    x, z = jax.tree.map(jnp.cos, PARAMS), jax.tree.map(jnp.sin, PARAMS)
    y = {k: of[k] * x[k] + (1 - of[k]) * z[k] for k in x}
    found = hg.ScheduleFreeAdamW(0.1, b1=b1).averaged(y, {"base": z})
    for k, expected in x.items():
        np.testing.assert_allclose(found[k], expected, rtol=1e-5)


def test_leaves_of_another_rule_stay_as_they_are() -> None:
    found = hg.ScheduleFreeAdamW(0.1).averaged(PARAMS, {"base": {"a": PARAMS["a"], "b": None}})
    np.testing.assert_allclose(found["b"], PARAMS["b"])
    np.testing.assert_allclose(found["a"], PARAMS["a"], rtol=1e-6)


def test_a_schedule_of_b1_that_is_none_is_refused_as_any() -> None:
    with pytest.raises(ValueError, match=r"hg.PerStep of shape \(\); its leading axis must be steps=3"):
        hg.train(loss, PARAMS, hg.ScheduleFreeAdamW(0.1, b1=hg.PerStep(0.9)), BATCHES, steps=3)


@pytest.mark.parametrize("b1", [0.0, 1.0, -0.5, 1.5])
def test_b1_is_a_share(b1: float) -> None:
    rule = hg.ScheduleFreeAdamW(0.1, b1=b1)
    with pytest.raises(ValueError, match=r"`b1` must be in \(0, 1\), the share of x in y"):
        hg.train(loss, PARAMS, rule, BATCHES, steps=3)
    with pytest.raises(ValueError, match=r"`b1` must be in \(0, 1\)"):
        rule.averaged(PARAMS, {"base": PARAMS})
