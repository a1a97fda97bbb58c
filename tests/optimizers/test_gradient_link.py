"""Rules whose parameters read the gradient of their own step: refused without a link, exact with one."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from classifier import batches, loss, params
from covering import long

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer, Transformed
from hypergrad.optimizers.held import held_link, schedule


class Plain(Optimizer):
    """w <- w - a g."""

    learning_rate: Any
    chain = (Link("params", lambda h, z, g: -h.learning_rate * g),)
    linear = True
    entrywise = True


class Bare(Optimizer):
    """w <- w - g / 10, without a hyperparameter."""

    chain = (Link("params", lambda h, z, g: -0.1 * g),)


class Ahead(Optimizer):
    """v <- m v - g;  w <- w + a (m v - g)."""

    learning_rate: Any
    momentum: Any = 0.9
    chain = (
        Link("velocity", lambda h, z, g: -g, decay="momentum"),
        Link("params", lambda h, z, g: h.learning_rate * (h.momentum * z.velocity - g)),
    )
    linear = True
    entrywise = True


@pytest.mark.parametrize("rule", [Plain(0.1), Bare(), Ahead(0.1), hg.clip(Ahead(0.1), 1.0)], ids=lambda x: type(x).__name__)
def test_without_a_link_such_a_rule_is_refused_and_the_cure_named(rule: Optimizer) -> None:
    message = r"`params` must take \(h, z\), not the gradient.*no explicit inverse. hg.with_gradient_link\(.*\("
    with pytest.raises(TypeError, match=message):
        hg.train(loss, params(), rule, batches(), steps=2)


@pytest.mark.long
def test_gradient_descent_with_a_link_is_momentum_of_that_decay() -> None:
    linked = hg.train(loss, params(), hg.with_gradient_link(Plain(0.1), bits=3), batches(), steps=30)
    momentum = hg.train(loss, params(), hg.SGD(0.1, 2.0**-3), batches(), steps=30)
    np.testing.assert_allclose(linked.losses, momentum.losses, rtol=1e-6)


def test_a_rule_without_hyperparameters_gets_a_link() -> None:
    run = hg.train(lambda w, _, batch: 0.5 * w**2, 1.0, hg.with_gradient_link(Bare(), bits=16), hg.full_batch(0.0), steps=5)
    np.testing.assert_allclose(run.params, 0.9**5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.of_bits
def test_a_name_of_the_library_is_its_rule_with_a_link() -> None:
    one = hg.train(loss, params(), hg.Nesterov(0.1), batches(), steps=20)
    other = hg.train(loss, params(), hg.with_gradient_link(Ahead(0.1)), batches(), steps=20)
    for x, y in zip(jax.tree.leaves((one.params, one.state)), jax.tree.leaves((other.params, other.state)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("rule", "shapes"),
    [
        long(hg.clip_by_global_norm(hg.Nesterov(0.1), 1.0), None),
        long(hg.Lion(0.01, temperature=0.5), None),
        long(hg.ScheduleFreeAdamW(hg.PerStep(jnp.linspace(0.005, 0.01, 8)), weight_decay=0.1), None),
        long(hg.ADOPT(0.01, weight_decay=0.1), None),
        long(hg.LARS(0.1, weight_decay=0.1, trust=0.1), None),
        long(hg.LAMB(0.01, weight_decay=0.1), None),
        long(hg.muon_with_adamw(0.02, weight_decay=0.1, nesterov=True), {"b": jnp.ones(3), "w": jnp.ones((2, 3))}),
    ],
    ids=["nesterov", "lion", "schedule-free", "adopt", "lars", "lamb", "muon"],
)
def test_a_rule_keeps_the_contract(rule: Optimizer, shapes: Any) -> None:
    hg.testing.check_optimizer(rule, shapes)


@pytest.mark.parametrize(
    ("rule", "bits"),
    [
        long(hg.Nesterov(0.05, bits=4), 4 - math.log2(0.9)),
        long(hg.NAdamW(0.01, b2=0.99, weight_decay=0.0, bits=1), 1 - math.log2(0.9) - math.log2(0.99)),
        long(hg.Lion(0.001, b2=0.9, weight_decay=0.0), 2 - math.log2(0.9)),
        long(hg.Lion(0.001, b2=0.9, weight_decay=0.0, temperature=0.1), 4 - math.log2(0.9)),
    ],
    ids=["nesterov", "nadamw", "lion", "smooth lion"],
)
def test_the_bits_are_those_of_theory(rule: Optimizer, bits: float) -> None:
    steps = 600
    proof = hg.check_reversal(loss, params(), rule, batches(), steps=steps)
    assert proof.exact
    np.testing.assert_allclose(proof.ideal_bits_per_parameter_step, bits, rtol=1e-3)
    np.testing.assert_allclose(proof.bits_per_parameter_step, bits, rtol=0.02, atol=48 / steps)


@pytest.mark.parametrize(
    ("rule", "steps"),
    [long(hg.Nesterov, 1), long(hg.Lion, 3), long(hg.ScheduleFreeAdamW, 1), long(hg.ScheduleFreeAdamW, 200)],
    ids=["nesterov", "lion", "schedule-free, one step", "schedule-free"],
)
def test_there_is_room_where_all_is_traced(rule: Any, steps: int) -> None:
    end = lambda a: hg.train(loss, params(), rule(a), batches(), steps=steps).losses[-1]  # noqa: E731
    assert jnp.isfinite(jax.jit(jax.grad(end))(0.01))


@pytest.mark.long
def test_a_sign_has_no_derivative_and_a_smooth_one_has() -> None:
    end = lambda rule: hg.train(loss, params(), rule, batches(), steps=20).losses[-1]  # noqa: E731
    rules = hg.Lion(0.002), hg.Lion(0.002, temperature=0.05)
    hard, smooth = (jax.jit(jax.grad(end))(jax.tree.map(jnp.asarray, rule)) for rule in rules)
    assert hard.b1 == hard.b2 == 0
    assert hard.learning_rate != 0
    assert min(abs(x) for x in (smooth.b1, smooth.b2, smooth.temperature, smooth.learning_rate)) > 0


@pytest.mark.long
def test_a_rule_that_computes_something_else_today_is_seen() -> None:
    """It may read what changes; what was compiled of it for the last call is not taken again."""
    factor = [1.0]
    held = held_link("held", lambda h, z, g: factor[0] * g, 1, jnp.zeros_like, wide=False)

    class Reading(Optimizer):
        learning_rate: Any
        momentum: Any = 0.9
        chain = (Ahead.chain[0], Link("params", lambda h, z, g: -factor[0] * h.learning_rate * (g - z.velocity)))

    class Holding(hg.HeavyBall):
        chain = (held, hg.HeavyBall.chain[0], Link("params", lambda h, z: -h.learning_rate * z.held))

        def prepare(self, h: dict[str, jax.Array], steps: int) -> dict[str, jax.Array]:
            return h | schedule(h, 1, steps)

    for rule in (hg.with_gradient_link(Reading(0.1)), Holding(0.1)):
        factor[0] = 1.0
        before = hg.train(loss, params(), rule, batches(), steps=5).losses[-1]
        factor[0] = 2.0
        after = hg.train(loss, params(), rule, batches(), steps=5).losses[-1]
        assert after < before - 1e-3


@pytest.mark.parametrize("bits", [0, 17, 2.0, True])
@pytest.mark.parametrize("make", [lambda k: hg.Nesterov(0.1, bits=k), lambda k: hg.with_gradient_link(Ahead(0.1), k)])
def test_bits_of_the_link_are_an_int_from_1_to_16(make: Any, bits: Any) -> None:
    with pytest.raises(
        ValueError, match=f"`bits` of the gradient link must be an int from 1 to 16; got {bits}.* 4 is a good"
    ):
        make(bits)


def test_what_needs_no_link_or_is_no_rule_is_an_error() -> None:
    with pytest.raises(TypeError, match="parameters of SGD do not move by the gradient of their own step: it needs no link"):
        hg.with_gradient_link(hg.SGD(0.1))
    with pytest.raises(TypeError, match="wraps an optimizer, which comes first; got"):
        hg.with_gradient_link(0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="wraps a rule, and Clip wraps others: put it around the rule inside"):
        hg.with_gradient_link(hg.clip(Ahead(0.1), 1.0))


def test_errors_name_the_field_where_it_is() -> None:
    with pytest.raises(hg.RangeError, match=r"optimizer.rule.momentum for params"):
        hg.train(loss, params(), hg.with_gradient_link(Ahead(0.1, 1.5)), batches(), steps=2)


class Drawn(Transformed):
    """g <- 0.5 g + c d for the links after d, the link of the gradient, which itself sees g."""

    amount: Any
    reads, linear_transform, entrywise_transform = ("gradient",), True, True

    @staticmethod
    def transform(h: Any, w: Any, g: Any, z: Any) -> Any:
        return [0.5 * x + hj.amount * zj.gradient for hj, x, zj in zip(h, g, z, strict=True)]


@pytest.mark.long
def test_a_linear_transformation_may_read_the_link() -> None:
    """What it passes back to the link is known only when what comes after it has been undone."""

    def slopes(adjoint: Any) -> Any:
        def value(rate: Any, amount: Any) -> jax.Array:
            rule = Drawn(hg.Nesterov(rate, 0.9), amount)
            return jnp.sum(jnp.cos(hg.train(wave, jnp.arange(1.0, 5.0), rule, data, steps=12, adjoint=adjoint).params))

        return jax.grad(value, (0, 1))(0.02, 0.3)

    with jax.enable_x64(True):
        wave, data = lambda w, _, x: jnp.sum(jnp.sin(w * x) + w**2), hg.full_batch(jnp.float64(1.3))
        np.testing.assert_allclose(slopes(hg.Reversible()), slopes(hg.Unrolled()), rtol=1e-9)
