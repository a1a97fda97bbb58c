"""Which increments are computed beside all else, and that the others come back, too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from covering import long

import hypergrad as hg
from hypergrad._isolation import only_products
from hypergrad.optimizers import Link, Optimizer
from hypergrad.optimizers.block import _remembered, decided
from hypergrad.optimizers.lay_out import lay_out
from hypergrad.run.per_step import like_one_step, split_steps


def program(function: Callable[..., Any]) -> Any:
    x = jnp.ones(3)
    return jax.make_jaxpr(function)(x, x).jaxpr


PRODUCTS = {
    "a product": lambda a, b: -(2 * a) * b,
    "a square": lambda a, b: a**2 * b,
    "a product that is spread": lambda a, b: jnp.broadcast_to(-(a * b), (2, 3)),
}
MORE = {
    "a sum of what goes in": lambda a, b: (1 - a) * b,
    "a root": lambda a, b: jnp.sqrt(a * b),
    "a quotient": lambda a, b: a / 3,
    "a choice": lambda a, b: jnp.where(a > 0, a, b),
    "a call": lambda a, b: jax.jit(lambda x: x * b)(a),
    "a polynomial": lambda a, b: jnp.exp(a) * b,
    "a sum over entries": lambda a, b: a * b.sum(),
    "a matrix product": lambda a, b: jnp.outer(a, b) @ b,
    "a loop": lambda a, b: jax.lax.fori_loop(0, 2, lambda _, x: x * b, a),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_nothing_but_products(name: str) -> None:
    assert only_products(program(PRODUCTS[name]))


@pytest.mark.parametrize("name", MORE)
def test_more_than_products(name: str) -> None:
    assert not only_products(program(MORE[name]))


def test_a_sum_of_scalars_is_stored_before() -> None:
    assert only_products(jax.make_jaxpr(lambda a, b: (1 - a) * b)(1.0, jnp.ones(3)).jaxpr)


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


def isolated(optimizer: Optimizer, dtype: Any) -> tuple[bool, ...]:
    out = lay_out(optimizer, jnp.ones((3, 4), dtype), 5, None, None, unbounded=False)
    (block,) = decided(out.blocks, like_one_step(out.h), out.values, None)
    return block.isolated


def test_what_is_isolated() -> None:
    """All that is more than products; and all in float64."""
    expected = {
        hg.SGD(0.1): (False, False),
        hg.HeavyBall(0.1): (False, False),
        hg.Adam(0.1): (False, False, True),
        Both(): (False, True),
        Scalar(): (False, False),
    }
    for optimizer, flags in expected.items():
        assert isolated(optimizer, jnp.float32) == flags
    with jax.enable_x64(True):
        assert isolated(hg.SGD(0.1), jnp.float64) == (True, True)


@pytest.mark.of_bits
@pytest.mark.parametrize(
    "optimizer",
    [long(Both()), long(Read()), long(Scalar()), hg.Adam(0.01), long(hg.AdamW(0.01, eps=jnp.full((3, 4), 1e-3)))],
)
def test_either_way_comes_back(optimizer: Optimizer) -> None:
    """In the open on the way out, behind a branch beside the derivative: the same bits, and the certificate of a run."""
    w = jnp.linspace(-1, 1, 12).reshape(3, 4)

    def loss(w: jax.Array, theta: Any, t: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(w + 0.1 * t) ** 2)

    def final(optimizer: Optimizer) -> jax.Array:
        return jnp.sum(hg.train(loss, w, optimizer, lambda t: t, steps=40).params ** 2)

    found = jax.grad(final)(optimizer)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))


def test_blocks_of_other_hyperparameters_are_decided_apart() -> None:
    w = {"a": jnp.ones((3, 4)), "b": jnp.ones((3, 4))}
    out = lay_out(Scalar(eps={"a": 0.01, "b": jnp.full((3, 4), 0.01)}), w, 5, None, None, unbounded=False)
    blocks = decided(out.blocks, like_one_step(out.h), out.values, None)
    assert [block.isolated for block in blocks] == [(False, False), (False, True)]


def test_increments_of_the_library_are_read_once() -> None:
    """What is not the library's may compute something else at the next call; two float types are two programs."""
    sums, w = False, jnp.ones((3, 4))

    def update(h: Any, z: Any) -> jax.Array:
        asked.append(z)
        return h.learning_rate * (z.velocity + z.velocity if sums else z.velocity)

    class Own(Both):
        chain = (Both.chain[0], Link("params", update))

    asked: list[Any] = []
    _remembered.cache_clear()  # other tests may have asked for the same
    before = _remembered.cache_info().misses
    assert isolated(Own(), w.dtype) == (False, False) and len(asked) == 1
    sums = True
    assert isolated(Own(), w.dtype) == (False, True) and len(asked) == 2
    assert _remembered.cache_info().misses == before
    for _ in range(2):
        assert isolated(hg.HeavyBall(0.123), jnp.float16) == (False, False)
        with jax.enable_x64(True):
            assert isolated(hg.HeavyBall(0.123), jnp.float16) == (False, False)
            assert isolated(hg.HeavyBall(0.123), jnp.float64) == (True, True)
    assert _remembered.cache_info().misses == before + 3


@pytest.mark.parametrize("steps", [1, 4])
def test_hyperparameters_of_one_step_are_known_without_a_trace(steps: int) -> None:
    shapes = [(1,), (steps,), (1, 3, 4), (steps, 3, 4), (1, 1), (steps, 1), (steps, 1, 1), (1, 0), (steps, 0, 2)]
    h = [{str(i): jnp.ones(shape, "float16" if i % 2 else "float32") for i, shape in enumerate(shapes)}]
    constant, stepped = jax.eval_shape(lambda h: split_steps(h, steps), h)
    first = jax.eval_shape(lambda stepped: jax.tree.map(lambda x: x[0], stepped), stepped)
    assert like_one_step(h) == [{**constant[0], **first[0]}]
