"""Schedule-Free AdamW is evaluated at the average of its iterates, and refuses what would make that another place."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import fails_compiled

import hypergrad as hg


PARAMS = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
BATCHES = hg.full_batch(jnp.zeros(1))


def loss(w: Any, _: Any, batch: Any) -> jax.Array:
    return sum(jnp.sum((x - 2) ** 2) for x in jax.tree.leaves(w)) / 2


RATES, POWERS = jnp.array([0.05, 0.1, 0.08, 0.2, 0.15]), jnp.array([2.0, 0.5, 1.0, 3.0, 1.5])
SIDE = np.array([1.0, -0.5, 2.0])


def bent(w: Any, _: Any, batch: Any) -> jax.Array:
    return jnp.sum(jnp.logaddexp(w - 0.3, 0) + 0.1 * w**2)


def plain(rates: Any, powers: Any) -> jax.Array:
    """y of the docstring's lines, by x and z."""
    b1, b2 = 0.9, round(0.999 * 2**16) / 2**16
    x = z = y = jnp.asarray(SIDE)
    s, total = 0.0, 0.0
    for t in range(len(rates)):
        g = jax.grad(bent)(y, None, None)
        s = b2 * s + (1 - b2) * g**2
        z = z - rates[t] * g / (jnp.sqrt(s / (1 - b2 ** (t + 1))) + 1e-8)
        weight = jnp.max(rates[: t + 1]) ** powers[t]
        total = total + weight
        c = jnp.minimum(weight / total, 1 - 2.0**-15)
        x = (1 - c) * x + c * z
        y = b1 * x + (1 - b1) * z
    return y


def test_each_step_has_the_power_that_it_is_given() -> None:
    with jax.enable_x64(True):

        def end(scale: Any, powers: Any) -> jax.Array:
            rule = hg.ScheduleFreeAdamW(hg.PerStep(scale * RATES), weight_lr_power=hg.PerStep(powers), bits=16)
            return hg.train(bent, jnp.asarray(SIDE), rule, BATCHES, steps=len(RATES)).params @ SIDE

        at = jnp.float64(1.0), POWERS.astype(float)
        value, slopes = jax.value_and_grad(end, (0, 1))(*at)
        expected, derivatives = jax.value_and_grad(lambda a, p: plain(a * RATES, p) @ SIDE, (0, 1))(*at)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), slopes, derivatives)


def test_another_power_from_a_step_on(tmp_path: pathlib.Path) -> None:
    with jax.enable_x64(True):
        rule = lambda p: hg.ScheduleFreeAdamW(hg.PerStep(RATES), weight_lr_power=p, bits=16)  # noqa: E731
        record = hg.record(bent, jnp.asarray(SIDE), rule(2.0), BATCHES, steps=len(RATES), folder=tmp_path / "record")
        found = record.resume(3, optimizer=rule(0.5)).params
        np.testing.assert_allclose(found, plain(RATES, [2.0, 2.0, 2.0, 0.5, 0.5]), rtol=1e-5)


def test_a_power_that_is_no_number_is_told() -> None:
    rates = hg.PerStep(jnp.array([0.1, 0.3, 0.2]))
    rule = lambda power: hg.ScheduleFreeAdamW(rates, weight_lr_power=power)  # noqa: E731
    with fails_compiled(hg.RangeError, "learning_rate weight_decay)", "got nan"):
        jax.jit(lambda power: hg.train(loss, PARAMS, rule(power), BATCHES, steps=3).params)(jnp.nan)


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
