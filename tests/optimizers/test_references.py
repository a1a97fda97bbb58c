"""Each rule against optax's, with the decays as they are rounded here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from classifier import batches, by_optax, loss, on_grid, params
from covering import some_of
from tiny import fails, fails_compiled

import hypergrad as hg


B1, B2 = on_grid(0.9), on_grid(0.999)
KEPT = 2.0**-9  # a decay of the weights that is a multiple of 2^-24
RULES = {
    "Nesterov": (hg.Nesterov(0.05, bits=16), optax.sgd(0.05, B1, nesterov=True)),
    "NAdamW": (
        hg.NAdamW(0.004, weight_decay=KEPT / 0.004, bits=16),
        optax.nadamw(0.004, B1, B2, weight_decay=KEPT / 0.004),
    ),
    "Lion": (
        hg.Lion(0.002, 0.9, 0.99, KEPT / 0.002),
        optax.lion(0.002, 0.9, on_grid(0.99), weight_decay=KEPT / 0.002),
    ),
    "ScheduleFreeAdamW": (
        hg.ScheduleFreeAdamW(0.01, weight_decay=0.1, bits=16),
        optax.contrib.schedule_free_adamw(0.01, b1=0.9, b2=B2, weight_decay=0.1),
    ),
    "AdEMAMix": (
        hg.AdEMAMix(0.004, weight_decay=KEPT / 0.004),
        optax.contrib.ademamix(0.004, B1, B2, on_grid(0.9999, 2**24), weight_decay=KEPT / 0.004),
    ),
    "LARS": (hg.LARS(0.1, 0.9, 1e-3, 0.01), optax.lars(0.1, 1e-3, trust_coefficient=0.01, momentum=B1)),
    "LAMB": (hg.LAMB(0.01, weight_decay=1e-3, bits=16), optax.lamb(0.01, B1, B2, weight_decay=1e-3)),
    "ADOPT": (hg.ADOPT(0.004), optax.contrib.adopt(0.004, B1, on_grid(0.9999))),
    "Muon": (
        hg.muon_with_adamw(0.002, weight_decay=KEPT / 0.002),
        optax.contrib.muon(
            0.002,
            beta=on_grid(0.95),
            weight_decay=KEPT / 0.002,
            nesterov=False,
            adam_b1=B1,
            adam_b2=B2,
            adam_weight_decay=KEPT / 0.002,
        ),
    ),
}


@some_of("name", RULES, "Muon")
def test_a_rule_is_that_of_optax(name: str) -> None:
    ours, theirs = RULES[name]
    run = hg.train(loss, params(), ours, batches(), steps=150)
    _, losses = by_optax(theirs, 150)
    np.testing.assert_allclose(run.losses, losses, rtol=3e-5)
    assert losses[-1] < 0.95 * losses[0], "too little happens to tell rules apart"


@pytest.mark.long
def test_schedule_free_is_evaluated_at_the_average() -> None:
    rule = hg.ScheduleFreeAdamW(0.01, bits=16)
    run = hg.train(loss, params(), rule, batches(), steps=40)
    theirs = optax.contrib.schedule_free_adamw(0.01, b1=0.9, b2=B2)
    p, _ = by_optax(theirs, 40)
    state: Any = optax.contrib.schedule_free_adamw(0.01, b1=0.9, b2=B2).init(params())._replace(z=run.state["base"])
    expected = optax.contrib.schedule_free_eval_params(state, p)
    found = rule.averaged(run.params, run.state)
    for key, x in found.items():
        np.testing.assert_allclose(x, expected[key], rtol=1e-3, atol=2e-5)
        assert x.dtype == jnp.float32


@pytest.mark.long
def test_adopt_goes_on_without_a_first_step() -> None:
    """Cut in two, the run is the run, but for how far gradients may go."""
    whole = hg.train(loss, params(), hg.ADOPT(0.01), batches(), steps=20)
    half = hg.train(loss, params(), hg.ADOPT(0.01), batches(), steps=10)
    rest = hg.train(loss, half.params, hg.ADOPT(0.01), batches(), steps=10, state=half.state)
    still = hg.train(loss, params(), hg.ADOPT(0.01), batches(), steps=1)
    np.testing.assert_array_equal(still.params["w1"], params()["w1"])
    assert not np.array_equal(rest.params["w1"], half.params["w1"])
    np.testing.assert_allclose(rest.losses[:1], whole.losses[10:11], rtol=1e-6)


@pytest.mark.long
def test_the_first_gradient_after_a_state_of_adopt_counts() -> None:
    half = hg.train(loss, params(), hg.ADOPT(0.01), batches(), steps=2)
    on = lambda sign: hg.train(  # noqa: E731
        lambda *a: sign * loss(*a), half.params, hg.ADOPT(0.01), batches(), steps=1, state=half.state
    ).state["mean"]["w1"]
    assert not np.array_equal(on(1.0), on(-1.0))


def test_a_b1_of_adopt_that_rounds_to_one_is_no_mean() -> None:
    rule = lambda b1: hg.train(loss, params(), hg.ADOPT(0.01, b1), batches(), steps=3).losses[-1]  # noqa: E731
    for b1 in (0.999995, 1.0):
        with fails(hg.RangeError, "hg.ADOPT: `b1`"):
            rule(b1)
        with fails_compiled(hg.RangeError, "b1"):
            jax.block_until_ready(jax.jit(rule)(b1))
    assert jnp.isfinite(jax.jit(rule)(1 - 2.0**-16))


def test_neither_the_step_of_lars_nor_its_derivative_knows_the_unit_of_the_loss() -> None:
    def end(rate: Any, unit: float) -> Any:
        loss = lambda w, _, goal: unit * jnp.sum(jnp.array([1.0, 3.0, 0.5]) * (w - goal) ** 2)  # noqa: E731
        goals = hg.full_batch(jnp.array([2.0, 1.0, -1.0]))
        return jnp.sum(hg.train(loss, jnp.array([1.0, -2.0, 3.0]), hg.LARS(rate, trust=0.1), goals, steps=10).params ** 2)

    expected, *found = (jax.value_and_grad(end)(0.1, unit) for unit in (1.0, 2.0**-36, 2.0**-48))
    for pair in found:
        np.testing.assert_allclose(pair, expected, rtol=1e-5)
