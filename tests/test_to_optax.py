"""`hg.to_optax`: a plain loop of optax, with what it gives, has the losses of our training."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chains import Change, Shampoo
from covering import long, some_of
from problems import network

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer


STEPS = 24
NET = network("tanh")


def per_step(low: float, high: float, steps: int = STEPS) -> hg.PerStep:
    return hg.PerStep(jnp.linspace(low, high, steps))


def plain(rule: optax.GradientTransformation, steps: int = STEPS, params: Any = None) -> tuple[Any, jax.Array]:
    """Parameters and losses of a loop as optax's users write it."""
    params = NET.params() if params is None else params

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state = carry
        loss, gradients = jax.value_and_grad(NET.loss)(params, NET.theta(), batch)
        updates, state = rule.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    begin = (params, rule.init(params))
    (params, _), losses = jax.lax.scan(step, begin, NET.batches(steps).arrays)
    return params, losses


def ours(optimizer: Any, steps: int = STEPS) -> hg.Trained:
    return hg.train(NET.loss, NET.params(), optimizer, NET.batches(steps), theta=NET.theta())


def groups(*values: Any) -> dict[str, Any]:
    return dict(zip(NET.params(), values, strict=True))


class AdaBelief(Optimizer):
    """The one of docs/your-own-optimizer.md: its `prepare` makes values of many steps together."""

    learning_rate: Any
    b1: Any = 0.9
    b2: Any = 0.99
    eps: Any = 1e-8

    chain = (
        Link("mean", lambda h, z, g: (1 - h.b1) * g, decay="b1"),
        Link("variance", lambda h, z, g: (1 - h.b2) * (g - z.mean) ** 2, decay="b2", wide=True),
        Link("params", lambda h, z: -h.learning_rate * (z.mean / h.correct) * jax.lax.rsqrt(z.variance + h.eps)),
    )

    def prepare(self, h: Any, steps: int) -> Any:
        b1 = jnp.broadcast_to(h["b1"], (steps, *h["b1"].shape[1:]))
        return {**h, "correct": 1 - jnp.cumprod(b1, axis=0)}


RATES = per_step(0.1, 0.01)
WRAPPED = functools.partial(hg.clip_by_global_norm, max_norm=per_step(0.3, 1.0))
CASES = {
    "SGD": lambda: hg.SGD(per_step(1.0, 0.1), per_step(0.5, 0.95)),
    "HeavyBall": lambda: hg.HeavyBall(groups(RATES, 0.05), groups(0.9, per_step(0.3, 0.9))),
    "Adam": lambda: hg.Adam(RATES, per_step(0.8, 0.95), per_step(0.9, 0.999)),
    "AdamW": lambda: hg.AdamW(RATES, groups(0.8, 0.9), per_step(0.9, 0.999), weight_decay=per_step(0.5, 0.1)),
    "RMSProp": lambda: hg.RMSProp(per_step(0.02, 0.005), 0.95, per_step(0.5, 0.9), 1e-4),
    "Adagrad": lambda: hg.Adagrad(per_step(0.05, 0.02), 0.8),
    "per weight": lambda: hg.HeavyBall({k: hg.PerStep(jnp.ones((STEPS, *w.shape)) / 20) for k, w in NET.params().items()}),
    "wrapped": lambda: WRAPPED(hg.add_decayed_weights(hg.clip(hg.HeavyBall(RATES), groups(0.1, 0.2)), per_step(0.5, 0.0))),
    "frozen AdamW": lambda: hg.freeze(WRAPPED(hg.AdamW(RATES, weight_decay=0.3)), groups(True, False)),
    "knots in domains": lambda: hg.SGD(hg.positive(hg.knots(jnp.array([1.0, 0.1]), STEPS)), hg.unit_interval(0.9)),
    "your own": lambda: AdaBelief(per_step(0.02, 0.01), per_step(0.8, 0.9)),
    "links of another shape": lambda: Shampoo(per_step(1e-2, 1e-3), 0.9),
    "the old value of another link": lambda: Change(per_step(1e-2, 1e-3)),
}
IN_SHORT = ("the old value of another link",)


@some_of("name", CASES, *IN_SHORT)
def test_a_plain_loop_has_the_losses_of_training(name: str) -> None:
    params, losses = plain(hg.to_optax(CASES[name]()))
    trained = ours(hg.natural(CASES[name]()))
    assert trained.losses[-1] < 0.95 * trained.losses[0]
    np.testing.assert_allclose(losses, trained.losses, atol=1e-5, rtol=0)
    for key, w in trained.params.items():
        np.testing.assert_allclose(params[key], w, atol=1e-4)


def held(values: hg.PerStep, steps: int) -> hg.PerStep:
    return hg.PerStep(jnp.concatenate([values.values, jnp.full(steps - STEPS, values.values[-1])]))


@pytest.mark.parametrize(
    "rule",
    [
        long(hg.ADOPT(0.01)),
        long(hg.Lion(0.002)),
        long(hg.NAdamW(hg.PerStep(jnp.linspace(0.001, 0.01, STEPS)), per_step(0.8, 0.9), bits=2)),
        long(hg.ScheduleFreeAdamW(0.02, bits=2)),
        hg.muon_with_adamw(0.02, labels=lambda p: {k: "muon" if x.ndim == 2 else "adamw" for k, x in p.items()}),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_so_have_rules_that_prepare_many_steps_or_differ_by_leaf(rule: Any) -> None:
    _, losses = plain(hg.to_optax(rule, STEPS))
    trained = ours(rule)
    assert trained.losses[-1] < 0.95 * trained.losses[0]
    np.testing.assert_allclose(losses, trained.losses, atol=1e-5, rtol=0)


@some_of("rule", [hg.SGD, hg.Adam, hg.AdamW], hg.AdamW)
def test_after_the_schedule_the_last_values_hold(rule: Any) -> None:
    rates, decays, steps = RATES, per_step(0.8, 0.9), 2 * STEPS
    _, losses = plain(hg.to_optax(rule(rates, decays)), steps)
    np.testing.assert_allclose(losses, ours(rule(held(rates, steps), held(decays, steps)), steps).losses, atol=1e-5, rtol=0)


def test_bias_corrections_without_a_schedule() -> None:
    """Of as many steps as one likes; the product of the decays loses no digits by being built up step by step."""
    _, losses = plain(hg.to_optax(hg.AdamW(0.01, 0.9, 0.999)), 200)
    np.testing.assert_allclose(losses, plain(optax.adamw(0.01, 0.9, 65470 / 65536), 200)[1], atol=1e-5, rtol=0)
    one = {"w": jnp.ones(1)}
    rule = hg.to_optax(hg.Adam(1.0, eps=0.0))
    state = rule.init(one)._replace(count=jnp.int32(20_000), log_kept={"mean_weight": -2000.0, "square_weight": -1e-3})
    moved, state = rule.update(one, state, one)
    assert set(state.log_kept) == {"mean_weight", "square_weight"}
    decay = 65470 / 65536
    np.testing.assert_allclose(state.log_kept["square_weight"], -1e-3 + np.log(decay), rtol=1e-6)
    np.testing.assert_allclose(moved["w"], -0.1 / np.sqrt((1 - decay) / (1 - np.exp(-1e-3) * decay)), rtol=1e-3)


def test_a_number_of_steps_may_be_an_array() -> None:
    one = {"w": jnp.ones(1)}
    states = [hg.to_optax(hg.ScheduleFreeAdamW(0.01), steps=steps).init(one) for steps in (jnp.int32(5), 5)]
    assert eqx.tree_equal(*states)


def test_composes_with_optax() -> None:
    chained = optax.chain(optax.clip_by_global_norm(0.3), hg.to_optax(hg.HeavyBall(RATES)))
    once = hg.to_optax(hg.clip_by_global_norm(hg.HeavyBall(RATES), 0.3))
    np.testing.assert_allclose(plain(chained)[1], plain(once)[1], atol=1e-6)
    skipping = optax.apply_if_finite(hg.to_optax(hg.Adam(RATES)), 3)
    np.testing.assert_allclose(plain(skipping)[1], plain(hg.to_optax(hg.Adam(RATES)))[1], atol=1e-6)


@pytest.mark.long
def test_a_learned_optimizer_goes_out() -> None:
    def train_fn(hypers: Any, key: Any) -> Any:
        return ours(hg.SGD(hypers["rate"], hypers["momentum"])).params

    hypers = {"rate": hg.positive(per_step(0.5, 0.5)), "momentum": hg.unit_interval(0.8)}
    result = hg.optimize(train_fn, NET.value, hypers, meta_steps=2)
    h = hg.natural(result.best.hypers)
    params, _ = plain(hg.to_optax(hg.SGD(h["rate"], h["momentum"])))
    np.testing.assert_allclose(NET.value(params), result.best.value, atol=1e-5)


def test_parameters_of_16_bits_and_models_with_holes() -> None:
    model = eqx.filter(eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    model = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model)
    rule = hg.to_optax(hg.AdamW(RATES))
    state = rule.init(model)
    updates, state = rule.update(jax.tree.map(jnp.ones_like, model), state, model)
    assert jax.tree.structure(updates) == jax.tree.structure(model)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state.links)} == {jnp.dtype(jnp.float32)}
    assert state.count == 1


@pytest.mark.parametrize(
    ("optimizer", "steps", "text"),
    [
        (lambda: {"rate": 0.1}, None, r"takes an optimizer; got dict. Make it of what was learned.*hg.natural\(result.best"),
        (lambda: hg.SGD, None, "takes an optimizer; got the class SGD itself"),
        (lambda: optax.adam(0.1), None, "this is optax's already"),
        (lambda: hg.SGD(RATES, per_step(0.1, 0.2, 5)), None, r"the schedules have lengths \[5, 24\]. They are of one"),
        (lambda: hg.SGD(RATES), 7, r"the schedules have lengths \[24\], and steps=7"),
        (lambda: hg.SGD(0.1), 0, "`steps` of hg.to_optax must be an integer of at least 1; got 0"),
        (lambda: hg.ScheduleFreeAdamW(0.1), None, r"`prepare` of ScheduleFreeAdamW may make other values for each step"),
        (lambda: AdaBelief(0.1), None, r"`prepare` of AdaBelief may make other values for each step.*Pass steps=..."),
    ],
)
def test_what_is_no_optimizer_of_one_run(optimizer: Any, steps: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        hg.to_optax(optimizer(), steps)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (lambda: hg.SGD({"w1": 0.1}), "optimizer.learning_rate must be one value or a pytree prefix of `params`"),
        (lambda: hg.SGD(0.1, 1.5), r"optimizer.momentum for params\['w1'\]"),
        (lambda: hg.SGD(hg.PerStep(jnp.ones((STEPS, 2)))), r"has shape \(2,\); each leaf must be a scalar"),
    ],
)
def test_what_does_not_fit_is_said_at_init(optimizer: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hg.to_optax(optimizer()).init(NET.params())


def test_parameters_are_needed() -> None:
    rule = hg.to_optax(hg.SGD(0.1))
    with pytest.raises(ValueError, match=r"needs the parameters: update\(gradients, state, params\)"):
        rule.update(NET.params(), rule.init(NET.params()))
