"""Which increments may be computed in the open: their bits do not depend on what is compiled with them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import hypergrad as hg
from hypergrad.loop import arithmetic, step
from hypergrad.optimizers import Link, Optimizer


def program(function: Callable[..., Any]) -> Any:
    x = jnp.ones(3)
    return jax.make_jaxpr(function)(x, x).jaxpr


OPEN = {
    "a product": lambda a, b: -(2 * a) * b,
    "a sum of what goes in": lambda a, b: (1 - a) * b,
    "a sum of a root": lambda a, b: a / (jnp.sqrt(a * b) + b),
    "a sum of a maximum": lambda a, b: jax.lax.max(a * b, b) + a,
    "a call": lambda a, b: jax.jit(lambda x: jnp.sqrt(x * b))(a) + 1,
}
AMBIGUOUS = {
    "a product in a sum": lambda a, b: a * b + a,
    "a square in a difference": lambda a, b: b - a**2,
    "a product that is negated and spread": lambda a, b: jnp.broadcast_to(-(a * b), (2, 3)) + b,
    "a choice that may be a product": lambda a, b: jnp.where(a > 0, a * b, a) + b,
    "a product out of a call": lambda a, b: jax.jit(lambda x: x * b)(a) + 1,
    "a product into a call": lambda a, b: jax.jit(lambda x: x + b)(a * b),
    "a sum in a call": lambda a, b: jax.jit(lambda x: x * b + 1)(a),
    "a quotient in a sum": lambda a, b: a / 3 + b,
    "a maximum with what is known": lambda a, b: jnp.maximum(a * b, 0) + 1,
    "half precision": lambda a, b: (a.astype(jnp.bfloat16) * b.astype(jnp.bfloat16)).astype(jnp.float32),
    "a polynomial": lambda a, b: jnp.exp(a) * b,
    "an approximate root": lambda a, b: a * jax.lax.rsqrt(b),
    "a sum over entries": lambda a, b: a * b.sum(),
    "a loop": lambda a, b: jax.lax.fori_loop(0, 2, lambda _, x: x * b, a),
}


@pytest.mark.parametrize("name", OPEN)
def test_rounded_operation_by_operation(name: str) -> None:
    assert not arithmetic.ambiguous(program(OPEN[name]), (False, False))


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous(name: str) -> None:
    assert arithmetic.ambiguous(program(AMBIGUOUS[name]), (False, False))


def test_a_sum_of_what_goes_in_is_ambiguous_where_that_may_be_a_product() -> None:
    difference = program(lambda a, b: abs(a - b))
    assert [arithmetic.ambiguous(difference, (x, y)) for x, y in ((False, False), (True, False), (False, True))] == [
        False,
        True,
        True,
    ]


def test_only_products() -> None:
    assert arithmetic.only_products(program(OPEN["a product"]))
    assert not arithmetic.only_products(program(OPEN["a sum of a root"]))


class Both(Optimizer):
    """v <- m v - g;  w <- w + a v / (sqrt(v^2 + 1) + e): a product in a sum, and a sum that none enters."""

    learning_rate: Any = 0.1
    momentum: Any = 0.9
    eps: Any = 0.01

    chain = (
        Link("velocity", lambda h, z, g: -g, decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity / (jnp.sqrt(z.velocity * z.velocity + 1) + h.eps)),
    )


class Open(Both):
    """The same with a root of v^2 alone in its sum."""

    chain = (
        Both.chain[0],
        Link("params", lambda h, z: h.learning_rate * z.velocity / (jnp.sqrt(z.velocity * z.velocity) + h.eps)),
    )


class Read(Both):
    """The same with |v|, which is a product with a unit."""

    chain = (
        Both.chain[0],
        Link("params", lambda h, z: h.learning_rate * z.velocity / (jnp.abs(z.velocity) + h.eps)),
    )


class Scalar(Both):
    """w <- w + (1 - a e) v: products, and a sum of scalars that one enters."""

    chain = (Both.chain[0], Link("params", lambda h, z: (1 - h.learning_rate * h.eps) * z.velocity))


def test_what_is_isolated_on_the_way_out_is_on_the_way_back() -> None:
    names = ("learning_rate", "eps", "unbias_mean", "unbias_square", "unbias_root", "least")
    h, z = dict.fromkeys(names, jnp.float32(0.1)), dict.fromkeys(("velocity", "mean", "square"), jnp.ones(3))
    rule = cast(Any, SimpleNamespace(linear=False, double=False))
    for optimizer, out in ((Scalar, True), (Both, True), (Read, True), (Open, False), (hg.Adam, False)):
        link = optimizer.chain[-1]
        assert (step.ambiguous(rule, link, h, z, None), step.composite(rule, link, h, z, None)) == (out, True)


def test_in_linear_rules_what_no_branch_stores_is_a_product() -> None:
    h, z = {"learning_rate": jnp.float32(0.1), "momentum": jnp.float32(0.9)}, {"a": jnp.ones(3), "b": jnp.ones(3)}
    sum_of_links = Link("params", lambda h, z: h.learning_rate * (z.a + z.b))
    sum_with_gradient = Link("a", lambda h, z, g: h.learning_rate - g)
    for isolate in (False, True):
        rule = cast(Any, SimpleNamespace(linear=True, isolate=isolate, double=False))
        assert step.ambiguous(rule, sum_of_links, h, z, None)
        assert step.ambiguous(rule, sum_with_gradient, h, z, jnp.ones(3)) == (not isolate)
        for link, g in zip(hg.SGD.chain, (jnp.ones(3), None), strict=True):
            assert not step.composite(rule, link, h, {"velocity": jnp.ones(3)}, g)


@pytest.mark.of_bits
@pytest.mark.parametrize("optimizer", [Both(), Read(), Scalar(), hg.Adam(0.01), hg.AdamW(0.01, eps=jnp.full((3, 4), 1e-3))])
def test_either_way_comes_back(optimizer: Optimizer) -> None:
    """In the open on the way out, behind a branch beside the derivative: the same bits, and the certificate of a run."""
    w = jnp.linspace(-1, 1, 12).reshape(3, 4)

    def loss(w: jax.Array, theta: Any, t: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(w + 0.1 * t) ** 2)

    def final(optimizer: Optimizer) -> jax.Array:
        return jnp.sum(hg.train(loss, w, optimizer, lambda t: t, steps=40).params ** 2)

    found = jax.grad(final)(optimizer)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))
