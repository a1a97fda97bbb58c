"""`check_optimizer` passes what keeps the contract and says what is wrong with what breaks it."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer


class Base(Optimizer):
    """s <- r s + (1 - r) g^2;  v <- m v - g f(s);  w <- w + a v."""

    learning_rate: Any = 0.1
    decay: Any = 0.9
    momentum: Any = 0.9


SQUARE = Link("square", lambda h, z, g: (1 - h.decay) * (g * g), decay="decay", wide=True)
VELOCITY = Link("velocity", lambda h, z, g: -g / (1 + z.square), decay="momentum")
PARAMS = Link("params", lambda h, z: h.learning_rate * z.velocity)


def changed(link: Link, increment: Any, linear: bool = False) -> Optimizer:
    """`Base` with one increment replaced."""
    chain = tuple(link._replace(increment=increment) if k is link else k for k in (SQUARE, VELOCITY, PARAMS))
    return type("Broken", (Base,), {"__module__": __name__, "__annotations__": {}, "chain": chain, "linear": linear})()


@jax.custom_jvp
def negative(x: jax.Array) -> jax.Array:
    return -x


negative.defjvps(lambda t, y, x: -1.001 * t)
COUNT = itertools.count()
BROKEN = {
    "linear in name only": (
        lambda: changed(SQUARE, SQUARE.increment, linear=True),
        "Broken declares linear = True, but .* link `square` not linearly",
    ),
    "a derivative that is off by 0.1%": (
        lambda: changed(PARAMS, lambda h, z: h.learning_rate * -negative(z.velocity)),
        "derivative of the increment of link `params` is not what differences give",
    ),
    "another value at each call": (
        lambda: changed(VELOCITY, lambda h, z, g: -g * (1 + 1e-6 * next(COUNT))),
        "link `velocity` gives two values for the same arguments. It must be a pure function",
    ),
    "a root at zero": (
        lambda: changed(VELOCITY, lambda h, z, g: -g / (1 + jnp.sqrt(z.square))),
        "the derivative in optimizer.* is NaN or infinite. One weight of this problem never has a gradient.* sqrt",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_optimizer_is_told_what_is_wrong(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        hg.testing.check_optimizer(make())


def test_a_sound_optimizer_passes() -> None:
    hg.testing.check_optimizer(hg.AdamW(0.01, hg.PerStep(jnp.linspace(0.8, 0.9, 8)), weight_decay=0.1))


def test_a_step_that_is_not_undone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from hypergrad.loop import step

    real = step.subtract
    monkeypatch.setattr(step, "subtract", lambda z, x, bits: jax.tree.map(lambda y: y + 1, real(z, x, bits)))
    with pytest.raises(AssertionError, match="unstep did not undo step 7: link `.*`, leaf 0, is off by up to"):
        hg.testing.check_inverse(hg.SGD(0.1), steps=8)


@pytest.mark.parametrize("name", ["Nesterov", "NAdam", "Lion", "Adadelta"])
def test_rules_without_inverse_are_refused_by_name(name: str) -> None:
    with pytest.raises(AttributeError, match=f"hg.{name} does not exist: the rule has no exact inverse.* Take hg."):
        getattr(hg, name)


@pytest.mark.parametrize("optimizer", [hg.SGD(0.1, 0.0), hg.RMSProp(0.1, momentum=0.0), hg.Adagrad(0.1, momentum=0.0)])
def test_rules_without_momentum_are_refused_with_the_reason(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    with pytest.raises(hg.RangeError, match=rf"momentum.* got 0.0.* no inverse \(.*{name}.* without momentum"):
        hg.testing.check_inverse(optimizer)
