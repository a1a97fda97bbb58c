"""`check_optimizer` passes what keeps the contract and says what is wrong with what breaks it."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of

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


def changed(link: Link, increment: Any = None, more: Any = (), **parts: Any) -> Optimizer:
    """`Base` with one increment, or more of a link, replaced."""
    new = link._replace(increment=increment or link.increment, **dict(more))
    chain = tuple(new if k is link else k for k in (SQUARE, VELOCITY, PARAMS))
    return type("Broken", (Base,), {"__module__": __name__, "__annotations__": {}, "chain": chain, **parts})()


@jax.custom_jvp
def negative(x: jax.Array) -> jax.Array:
    return -x


negative.defjvps(lambda t, y, x: -1.001 * t)


@jax.custom_jvp
def loud(x: jax.Array) -> jax.Array:
    return x


loud.defjvps(lambda t, y, x: jnp.where(abs(x) > 2, 1.1, 1.0) * t)


@jax.custom_jvp
def size(x: jax.Array) -> jax.Array:
    return abs(x)


size.defjvps(lambda t, y, x: t)


fixed = jax.lax.stop_gradient


class Cut(Base):
    linear = True
    chain = (
        Link("velocity", lambda h, z, g: -jnp.clip(g, -1.6, 1.6), decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity),
    )


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
    "a derivative that is off where the gradient is large": (
        lambda: changed(VELOCITY, lambda h, z, g: -loud(g)),
        "derivative of the increment of link `velocity` is not what differences give",
    ),
    "a derivative that is missing where two hyperparameters differ": (
        lambda: changed(PARAMS, lambda h, z: (h.learning_rate + 3 * fixed(h.learning_rate - h.momentum)) * z.velocity),
        "derivative of the increment of link `params` is not what differences give",
    ),
    "a derivative that is missing below a bound of a hyperparameter": (
        lambda: changed(
            PARAMS, lambda h, z: jnp.where(h.learning_rate < 0.2, fixed(h.learning_rate), h.learning_rate) * z.velocity
        ),
        "derivative of the increment of link `params` is not what differences give",
    ),
    "a derivative that is wrong where a link is large": (
        lambda: changed(PARAMS, lambda h, z: 0.1 * (z.velocity + fixed(jnp.clip(z.velocity, -2, 2) - z.velocity))),
        "derivative of the increment of link `params` is not what differences give",
    ),
    "a derivative that is missing where weights are small": (
        lambda: changed(VELOCITY, lambda h, z, g: -g - jnp.where(abs(z.params) < 0.4, fixed(z.params), z.params)),
        "derivative of the increment of link `velocity` is not what differences give",
    ),
    "no number at its own hyperparameters": (
        lambda: changed(PARAMS, lambda h, z: jnp.log(h.learning_rate - h.momentum) * z.velocity),
        "link `params` becomes NaN or infinite with these hyperparameters",
    ),
    "another value at each call": (
        lambda: changed(VELOCITY, lambda h, z, g: -g * (1 + 1e-6 * next(COUNT))),
        "link `velocity` gives two values for the same arguments. It must be a pure function",
    ),
    "a derivative that is wrong below zero": (
        lambda: changed(SQUARE, lambda h, z, g: (1 - h.decay) * size(g)),
        "derivative of the increment of link `square` is not what differences give",
    ),
    "a derivative that is wrong where a link is below zero": (
        lambda: changed(PARAMS, lambda h, z: h.learning_rate * z.velocity * size(z.velocity)),
        "derivative of the increment of link `params` is not what differences give",
    ),
    "entry by entry where a link is above zero only": (
        lambda: changed(PARAMS, lambda h, z: z.velocity + jnp.minimum(z.velocity, 0).sum(), entrywise=True),
        "the increment of link `params` depends on what else is in the leaf",
    ),
    "entry by entry above zero only": (
        lambda: changed(VELOCITY, lambda h, z, g: -g * (1 + jnp.minimum(g, 0).sum()), entrywise=True),
        "the increment of link `velocity` depends on what else is in the leaf",
    ),
    "linear where the gradient is small": (
        lambda: Cut(),
        "Cut declares linear = True, but .* link `velocity` not linearly",
    ),
    "entry by entry where the gradient is small": (
        lambda: changed(VELOCITY, lambda h, z, g: -g / jnp.maximum(1, jnp.sum(g * g) / 100), entrywise=True),
        "the increment of link `velocity` depends on what else is in the leaf",
    ),
    "a norm of nothing": (
        lambda: changed(VELOCITY, lambda h, z, g: -g / (1 + jnp.linalg.norm(g))),
        "the derivative in .* is NaN or infinite. .* all none at last: is there a sqrt, a norm",
    ),
    "a root at zero": (
        lambda: changed(VELOCITY, lambda h, z, g: -g / (1 + jnp.sqrt(z.square))),
        "the derivative in optimizer.* is NaN or infinite. One weight of this problem never has a gradient.* sqrt",
    ),
}


@some_of("name", BROKEN, *(name for name in BROKEN if name not in ("a norm of nothing", "a root at zero")))
def test_a_broken_optimizer_is_told_what_is_wrong(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        hg.testing.check_optimizer(make(), None if "entry by entry" in name else jnp.ones(4))


@pytest.mark.parametrize("optimizer", [long(hg.SGD(0.1))], ids=lambda x: type(x).__name__)
def test_a_leaf_may_be_empty(optimizer: Optimizer) -> None:
    hg.testing.check_optimizer(optimizer, {"none": jnp.ones(0), "w": jnp.ones(3)})


@pytest.mark.long
def test_a_reversal_that_fails_beside_derivatives_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from hypergrad.adjoints import link

    real = link.retreat
    monkeypatch.setattr(link, "retreat", lambda *a: real(*a[:-1], 2 * a[-1]))
    with pytest.raises(AssertionError, match=r"SGD: .* first bits where derivatives are taken; params\['b'\] differs first"):
        hg.testing.check_optimizer(hg.SGD(0.1))


MISNAMED = {
    "a decay": (
        lambda: changed(SQUARE, more={"decay": "beta"}),
        "Broken, link `square`: its decay is called 'beta', and no .*There are: learning_rate, decay, momentum",
    ),
    "a decay that is a number": (
        lambda: changed(SQUARE, more={"decay": 0.9}),
        "link `square`: decay must be the name of a hyperparameter; got 0.9",
    ),
    "links in a list": (
        lambda: changed(SQUARE, chain=[SQUARE, PARAMS]),
        "Broken.chain must be a tuple of links; got a list",
    ),
    "nothing prepared": (lambda: changed(SQUARE, prepare=lambda self, h, steps: None), "Broken.prepare must return a dict"),
}


@pytest.mark.parametrize("name", MISNAMED)
def test_what_is_missing_is_named(name: str) -> None:
    make, message = MISNAMED[name]
    with pytest.raises(TypeError, match=message):
        hg.testing.check_optimizer(make())


def test_a_misspelt_link_is_not_called_its_own_value() -> None:
    with pytest.raises(AttributeError, match=r"reads `velocty`, .*\(it has: .*velocity\). Is it spelt as the field"):
        hg.testing.check_optimizer(changed(PARAMS, lambda h, z: h.learning_rate * z.velocty))


class Anchored(Base):
    """s <- m s - (1 - m) g, from the parameters themselves;  w <- w + a s."""

    chain = (
        Link("slow", lambda h, z, g: -(1 - h.momentum) * g, decay="momentum", start=lambda w: w),
        Link("params", lambda h, z: h.learning_rate * z.slow),
    )


@pytest.mark.parametrize(
    "adjoint", [hg.Reversible(), long(hg.Unrolled()), long(hg.Checkpointed())], ids=lambda a: type(a).__name__
)
def test_first_values_made_from_parameters_have_their_derivative(adjoint: Any) -> None:
    def end(w: jax.Array) -> jax.Array:
        loss = lambda w, _, batch: jnp.sum((w - batch) ** 2)  # noqa: E731
        return jnp.sum(hg.train(loss, w, Anchored(), hg.full_batch(jnp.ones(1)), steps=5, adjoint=adjoint).params ** 2)

    with jax.enable_x64(True):
        hg.testing.check_hypergradient(end, jnp.array([1.0, -2.0]), tolerance=1e-8)


class Distance(Base):
    """d <- r d + (1 - r) |g - v|: what is read enters a sum, and is a product with its unit."""

    chain = (
        Link("velocity", lambda h, z, g: g, decay="momentum"),
        Link("distance", lambda h, z, g: (1 - h.decay) * abs(g - z.velocity), decay="decay", wide=True),
        Link("params", lambda h, z: -h.learning_rate * z.velocity * z.distance),
    )


@pytest.mark.long
@pytest.mark.of_bits
def test_what_is_read_may_enter_a_sum() -> None:
    """Beside derivatives, too: `check_reversal` goes back once with them."""
    loss = lambda w, _, batch: jnp.sum(jnp.sin(w - batch) ** 2)  # noqa: E731
    assert hg.check_reversal(loss, jnp.linspace(0.3, 1.1, 4), Distance(0.01), hg.full_batch(jnp.ones(4)), steps=20).exact


@pytest.mark.long
@pytest.mark.of_bits
def test_such_a_sum_keeps_the_contract() -> None:
    hg.testing.check_optimizer(Distance(0.01), jnp.ones(4))


@pytest.mark.of_bits
@some_of("optimizer", [hg.Adam, hg.RMSProp, hg.SGD], hg.SGD)
def test_what_one_direction_knows_and_the_other_does_not(optimizer: Any) -> None:
    """A program that is differentiated is two, and only one of them has the decays as constants."""

    def end(rate: jax.Array) -> jax.Array:
        loss = lambda w, _, batch: jnp.mean((w - batch) ** 2)  # noqa: E731
        batches = hg.full_batch(jnp.array([0.1, 0.2, 0.3]))
        return jnp.sum(hg.train(loss, jnp.array([0.3, -0.7, 1.1]), optimizer(rate), batches, steps=10).params)

    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.grad(jax.jit(end))(0.1), jax.jit(jax.grad(end))(0.1), rtol=1e-12)


@pytest.mark.parametrize(
    "optimizer",
    [
        hg.SGD(0.01, hg.PerStep(jnp.linspace(0.8, 0.9, 8))),
        long(hg.AdamW(0.01, hg.PerStep(jnp.linspace(0.8, 0.9, 8)), weight_decay=0.1)),
    ],
    ids=["SGD", "AdamW"],
)
def test_a_sound_optimizer_passes(optimizer: Optimizer) -> None:
    hg.testing.check_optimizer(optimizer)


@pytest.mark.parametrize(
    "params",
    [
        lambda h, z: jnp.sqrt(h.momentum - h.learning_rate) * z.velocity,
        long(lambda h, z: h.learning_rate / (1 - 2 * h.decay) * z.velocity),
        long(lambda h, z: h.learning_rate * jnp.round(z.velocity)),
    ],
)
def test_what_makes_numbers_of_its_own_hyperparameters_alone_passes(params: Any) -> None:
    hg.testing.check_optimizer(changed(PARAMS, params), jnp.ones(4))


def test_a_step_that_is_not_undone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from hypergrad.exact import Fixed

    real = Fixed.subtract
    monkeypatch.setattr(Fixed, "subtract", lambda z, x, bits: jax.tree.map(lambda y: y + 1, real(z, x, bits)))
    with pytest.raises(AssertionError, match="unstep did not undo step 7: link `.*`, block 0, is off by up to"):
        hg.testing.check_inverse(hg.SGD(0.1), steps=8)


def test_a_rule_whose_volume_depends_on_the_parameters_is_refused_with_the_cure() -> None:
    class Ahead(hg.HeavyBall):
        chain = (
            hg.HeavyBall.chain[0],
            Link("params", lambda h, z, g: h.learning_rate * (h.momentum * z.velocity - g)),
        )

    message = r"Ahead has no explicit inverse: a step multiplies volumes by exp\(.*\) at some.*hg.with_gradient_link\(Ahead"
    with pytest.raises(AssertionError, match=message):
        hg.testing.check_optimizer(Ahead(0.1))
