"""Kinds of numbers where others are meant: complex ones where real are, and floats of 8 bits."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of
from tiny import PARAMS, fails, final, train

import hypergrad as hg
from hypergrad.optimizers import Link, Optimizer
from hypergrad.optimizers.transform import Transformed


def rule(increment: Any = None, start: Any = None, signal: Any = None) -> Optimizer:
    seen: dict[str, Any] = {"signal": "s"} if signal else {}
    seen |= {"start": start} if start else {}

    class Rule(Optimizer):
        learning_rate: Any
        momentum: Any = 0.5
        signals = {"s": signal} if signal else {}
        chain = (
            Link("velocity", increment or (lambda h, z, g: -g), decay="momentum", **seen),
            Link("params", lambda h, z: h.learning_rate * z.velocity),
        )

    return Rule(0.1)


def transformed(function: Any, linear: bool = False) -> Any:
    class Own(Transformed):
        scale: Any
        linear_transform = entrywise_transform = linear
        transform = staticmethod(function)

    return lambda rate: Own(hg.SGD(rate, 0.5), 2 * rate)


COMPLEX = {
    "the increment of link `velocity`": rule(increment=lambda h, z, g: -g * jnp.exp(1j * g)),
    "`start` of link `velocity`": rule(start=lambda w: w * (1 + 2j)),
    "the signal 's' of the optimizer": rule(signal=lambda loss, p, theta, b, key: jax.tree.map(lambda x: x * 1j, p)),
    "what the transformation Own returns": transformed(lambda h, w, g: [jnp.fft.ifft(x) for x in g])(0.1),
}


@pytest.mark.parametrize("what", COMPLEX)
@pytest.mark.parametrize("adjoint", [hg.Reversible(), hg.Unrolled()], ids=["reversible", "unrolled"])
def test_an_imaginary_part_is_not_dropped(what: str, adjoint: Any) -> None:
    with fails(TypeError, f"{what} must be real; got complex64[2]", "real part"):
        train(optimizer=COMPLEX[what], adjoint=adjoint)


OF_OTHER_KINDS = {
    "means": lambda h, w, g: [jnp.mean(x) * own.scale for own, x in zip(h, g, strict=True)],
    "signs": lambda h, w, g: [jnp.sign(x).astype(int) for x in g],
}


@pytest.mark.parametrize(("name", "linear"), [long("means", False), ("means", True), ("signs", False)])
def test_a_transformation_may_return_what_fits(name: str, linear: bool) -> None:
    made = transformed(OF_OTHER_KINDS[name], linear)
    slopes = [jax.grad(lambda r, a=a: final(optimizer=made(r), adjoint=a))(0.1) for a in (hg.Reversible(), hg.Unrolled())]
    np.testing.assert_allclose(*slopes, rtol=1e-5)


def test_a_transformation_that_returns_too_little_or_what_does_not_fit() -> None:
    with fails(ValueError, "the transformation Own must return a gradient for each of the 1 arrays", "got 0"):
        train(optimizer=transformed(lambda h, w, g: [])(0.1))
    with fails(ValueError, "must return arrays of the shapes that it sees: for [2] it returned [3]"):
        train(optimizer=transformed(lambda h, w, g: [jnp.ones(3)])(0.1))


EIGHT_BITS = ["float8_e4m3fn", "float8_e5m2"]
X = np.random.default_rng(0).normal(size=(3, 8, 2)).astype(np.float32)
PULL = jnp.array([300.0, 30.0])  # what comes in is large: scaled to suit float16, most of it was below float8


@some_of(("parts", "dtype"), list(itertools.product([2, None], EIGHT_BITS)), (2, "float8_e4m3fn"))
def test_theta_of_eight_bits(dtype: str, parts: int | None) -> None:
    loss = lambda p, c, x: jnp.mean((jnp.tanh(x * p["w"]) * c.astype(jnp.float32) - 0.3) ** 2)  # noqa: E731

    def f(c: Any, adjoint: Any) -> Any:
        run = train(loss, PARAMS, hg.SGD(0.2), hg.stacked(X), theta=c, adjoint=adjoint, microbatches=parts)
        return jnp.sum(PULL * run.params["w"])

    ours, expected = (jax.grad(f)(jnp.array([0.5, 0.25], dtype), a) for a in (hg.Reversible(), hg.Unrolled()))
    np.testing.assert_allclose(ours.astype(np.float32), expected.astype(np.float32), rtol=0.07 if dtype[7] == "4" else 0.13)


@some_of("dtype", EIGHT_BITS, "float8_e4m3fn")
def test_a_loss_that_computes_in_eight_bits(dtype: str) -> None:
    """Its derivative is rounded to two or three bits: both roads take the same product, so that they round alike."""

    def loss(p: Any, c: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["w"].astype(dtype).astype(jnp.float32)) * c - 0.3) ** 2)

    def f(h: Any, adjoint: Any) -> Any:
        run = train(loss, PARAMS, hg.SGD(h["rate"]), hg.stacked(X), theta=h["theta"], adjoint=adjoint)
        return jnp.sum(PULL * run.params["w"])

    h = {"rate": jnp.float32(0.2), "theta": jnp.float32(0.7)}
    ours, expected = (jax.grad(f)(h, adjoint) for adjoint in (hg.Reversible(), hg.Unrolled()))
    for name in h:
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-4)


@pytest.mark.parametrize(("exponent", "mantissa", "unit"), [long(4, 3, 1.0), (5, 2, 1.0), (5, 10, 1e-8)])
def test_precision_that_is_reduced_is_as_good_as_a_dtype(exponent: int, mantissa: int, unit: float) -> None:
    """`jax.lax.reduce_precision` stays in float32, and rounds its derivative as a cast would."""
    rounded = {3: "float8_e4m3fn", 2: "float8_e5m2", 10: "float16"}[mantissa]

    def by_primitive(x: Any) -> Any:
        return jax.lax.reduce_precision(x, exponent, mantissa)

    def f(theta: Any, adjoint: Any, low: Any) -> Any:
        loss = lambda p, c, x: jnp.mean((jnp.tanh(low(x * p["w"])) * c - 0.3) ** 2)  # noqa: E731
        run = train(loss, PARAMS, hg.SGD(0.2), hg.stacked(X), theta=theta, adjoint=adjoint)
        return unit * jnp.sum(PULL * run.params["w"])

    theta = jnp.array([0.5, 0.25])
    ours, stored = (jax.grad(f)(theta, a, by_primitive) / unit for a in (hg.Reversible(), hg.Unrolled()))
    if unit == 1:
        np.testing.assert_allclose(ours, stored, rtol=1e-4)
    else:  # what `hg.Unrolled` loses below 6e-8, scaled cotangents keep
        cast = jax.grad(f)(theta, hg.Reversible(), lambda x: x.astype(rounded).astype(jnp.float32)) / unit
        np.testing.assert_allclose(ours, cast, rtol=2e-3, atol=5e-3)


@pytest.mark.parametrize("what", ["losses", long("metrics")])
def test_a_value_of_eight_bits_is_differentiated(what: str) -> None:
    narrow = lambda w: jnp.sum(w["w"] ** 2).astype("float8_e4m3fn")  # noqa: E731
    given: dict[str, Any] = {
        "losses": {"loss": lambda w, theta, b: narrow(w)},
        "metrics": {"loss": lambda w, theta, b: jnp.sum(w["w"] ** 2), "metric": lambda w, *rest: narrow(w)},
    }[what]

    def f(w: Any, adjoint: Any) -> Any:
        return getattr(train(params={"w": w}, adjoint=adjoint, **given), what).astype(jnp.float32).sum()

    ours, expected = (jax.grad(f)(jnp.array([0.5, -0.7]), a) for a in (hg.Reversible(), hg.Unrolled()))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


@jax.custom_vjp
def clipped_back(x: Any) -> Any:
    return x


clipped_back.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@jax.custom_vjp
def same_back(x: Any) -> Any:
    return x


same_back.defvjp(lambda x: (x, None), lambda _, g: (g,))


def eight(x: Any) -> Any:
    return x.astype("float8_e4m3fn").astype(x.dtype)


def by_rule(function: Any) -> Any:
    class Own(hg.SGD):
        chain = (Link("velocity", lambda h, z, g: (h.momentum - 1) * function(g), decay="momentum"), hg.SGD.chain[1])
        linear = True
        entrywise = True

    return lambda rate: Own(rate, 0.5)


LINEAR = {
    "a transformation that clips what passes back": transformed(lambda h, w, g: [clipped_back(x) for x in g], True),
    "a transformation through eight bits": transformed(lambda h, w, g: [eight(x) for x in g], True),
    "an increment through eight bits": by_rule(eight),
    "an increment with a rule of its own": by_rule(same_back),
}


@some_of("what", LINEAR, "a transformation that clips what passes back", "an increment through eight bits")
def test_a_linear_rule_hands_back_what_it_is_given(what: str) -> None:
    """The common factor of all weights comes before what rounds or bends a cotangent, and not after it."""
    loss = lambda p, c, x: jnp.mean((jnp.tanh(x * p["w"]) * c - 0.3) ** 2)  # noqa: E731

    def f(theta: Any, adjoint: Any) -> Any:
        run = train(loss, PARAMS, LINEAR[what](0.2), hg.stacked(X), theta=theta, adjoint=adjoint)
        return jnp.sum(run.params["w"] ** 2)

    ours, expected = (jax.grad(f)(jnp.array([0.5, 0.25]), a) for a in (hg.Reversible(), hg.Unrolled()))
    np.testing.assert_allclose(ours, expected, rtol=1e-4)
