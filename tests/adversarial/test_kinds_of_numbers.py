"""Kinds of numbers where others are meant: complex ones where real are, and floats of 8 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
        linear_transform = linear
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


@pytest.mark.parametrize(("name", "linear"), [("means", False), ("means", True), ("signs", False)])
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


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("parts", [None, 2])
def test_theta_of_eight_bits(dtype: str, parts: int | None) -> None:
    loss = lambda p, c, x: jnp.mean((jnp.tanh(x * p["w"]) * c.astype(jnp.float32) - 0.3) ** 2)  # noqa: E731

    def f(c: Any, adjoint: Any) -> Any:
        run = train(loss, PARAMS, hg.SGD(0.2), hg.stacked(X), theta=c, adjoint=adjoint, microbatches=parts)
        return jnp.sum(PULL * run.params["w"])

    ours, expected = (jax.grad(f)(jnp.array([0.5, 0.25], dtype), a) for a in (hg.Reversible(), hg.Unrolled()))
    np.testing.assert_allclose(ours.astype(np.float32), expected.astype(np.float32), rtol=0.07 if dtype[7] == "4" else 0.13)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
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
