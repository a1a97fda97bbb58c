"""The derivative of a maximum is that of the larger argument, though XLA computes what it compares twice and rounds it
otherwise: in losses, rules and transformations, and what JAX gives where arguments are equal or none."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import long, some_of

import hypergrad as hg
from hypergrad._choices import JAX_COMPARES_BITS
from hypergrad._mended import mending
from hypergrad._program_keys import contains
from hypergrad.optimizers import Link, Optimizer


RNG = np.random.default_rng(0)
W, MIXED = RNG.normal(size=(64, 33)), RNG.normal(size=(33, 5))
OF_TWO: dict[str, Callable[[Any, Any], Any]] = {"maximum": jnp.maximum, "minimum": jnp.minimum}


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def long_side(x: jax.Array) -> jax.Array:
    """hypot has a maximum of its arguments, the first of which XLA rounds once or twice."""
    return jnp.hypot(1 + x * x, jax.scipy.special.erf(x)) @ MIXED


def loss(w: jax.Array, theta: Any, _: Any) -> jax.Array:
    return theta * jnp.mean(long_side(w) ** 2)


def trained(theta: Any, adjoint: Any) -> jax.Array:
    run = hg.train(loss, jnp.asarray(W), hg.SGD(0.05, 0.5), hg.full_batch(None), theta=theta, steps=3, adjoint=adjoint)
    return run.params


@pytest.mark.of_bits
def test_training_follows_the_gradient() -> None:
    """As it is one operation at a time. Compiled by JAX 0.10.2 for most processors, every ninth entry is wrong by half."""
    run = hg.train(loss, jnp.asarray(W), hg.SGD(2.0, 0.5), hg.full_batch(None), theta=1.0, steps=1)
    np.testing.assert_allclose(W - run.params, jax.grad(loss)(jnp.asarray(W), 1.0, None), rtol=1e-9, atol=1e-10)


@pytest.mark.long
@pytest.mark.of_bits
@pytest.mark.parametrize("adjoint", [hg.Reversible(), long(hg.Unrolled())], ids=["reversible", "unrolled"])
def test_the_derivative_is_the_difference(adjoint: Any) -> None:
    value = jax.jit(lambda theta: jnp.sum(jnp.sin(trained(theta, adjoint))))
    found = jax.jit(jax.grad(value))(1.0)
    np.testing.assert_allclose(found, (value(1 + 1e-5) - value(1 - 1e-5)) / 2e-5, rtol=1e-6)


class Longer(Optimizer):
    rate: Any
    momentum: Any = 0.5
    chain = (
        Link("momentum", lambda h, z, g: g, decay="momentum"),
        Link("params", lambda h, z: -h.rate * (long_side(z.momentum) @ MIXED.T)),
    )


@pytest.mark.long
@pytest.mark.of_bits
def test_in_a_rule_too() -> None:
    square = lambda w, theta, _: theta * jnp.sum(w**2) / 2  # noqa: E731

    def value(rate: Any, theta: Any) -> Any:
        run = hg.train(square, jnp.asarray(W), Longer(rate), hg.full_batch(None), theta=theta, steps=3)
        return jnp.sum(jnp.sin(run.params))

    at, value = np.array([0.01, 0.7]), jax.jit(value)
    found = jax.jit(jax.grad(value, argnums=(0, 1)))(*at)
    differences = [(value(*(at + 1e-6 * along)) - value(*(at - 1e-6 * along))) / 2e-6 for along in np.eye(2)]
    np.testing.assert_allclose(found, differences, rtol=1e-6)


class Again(Optimizer):
    """None of its links reads the gradient itself."""

    rate: Any
    momentum: Any = 0.5
    chain = (
        Link("momentum", lambda h, z, g: g, decay="momentum", signal="again"),
        Link("params", lambda h, z: -h.rate * z.momentum),
    )
    signals: ClassVar = {"again": lambda loss, params, theta, batch, key: jax.grad(loss)(params, theta, batch)}


@pytest.mark.of_bits
def test_in_a_signal_that_differentiates_the_loss() -> None:
    run = hg.train(loss, jnp.asarray(W), Again(1.0), hg.full_batch(None), theta=1.0, steps=1)
    np.testing.assert_allclose(W - run.params, jax.grad(loss)(jnp.asarray(W), 1.0, None), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", OF_TWO)
@pytest.mark.parametrize(("x", "y"), [(1.0, 1.0), (np.nan, 1.0), (1.0, np.nan), (2.0, 1.0), (-1.0, 1.0), (0.0, -0.0)])
def test_equal_and_missing_arguments_are_shared_as_by_jax(name: str, x: float, y: float) -> None:
    both = lambda f: jax.value_and_grad(f, argnums=(0, 1))(x, y)  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, both(mending(OF_TWO[name])), both(OF_TWO[name]))


@some_of("dtype", ["float64", "float32", "bfloat16", "float16"], "float64")
def test_in_loops_branches_and_under_vmap_values_and_derivatives_are_those_of_jax(dtype: str) -> None:
    def function(x: jax.Array) -> jax.Array:
        over = lambda carry, row: (jnp.maximum(carry, row * x.dtype.type(0.5)), jnp.minimum(row, carry))  # noqa: E731
        largest, rows = jax.lax.scan(over, jnp.zeros_like(x[0]), x)
        chosen = jax.lax.cond(x[0, 0] > 0, lambda x: jnp.clip(x, -1, 1), jnp.negative, x)
        so_far = jax.lax.cummax(x, axis=1) * jax.lax.cummin(x * x, axis=0, reverse=True)
        return jnp.sum(jnp.sin(largest)) + jnp.sum(rows * rows) + jnp.sum(chosen * jnp.maximum(0, x)) + jnp.sum(so_far)

    x = jnp.asarray(RNG.normal(size=(3, 4, 5)), dtype)
    along = lambda f: jax.vmap(lambda x: (f(x), jax.grad(f)(x), jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1]))(x)  # noqa: E731
    rounding = 16 * float(jnp.finfo(dtype).eps)
    close = lambda *both: np.testing.assert_allclose(*(np.asarray(x, float) for x in both), rounding, rounding)  # noqa: E731
    jax.tree.map(close, jax.jit(along, static_argnums=0)(mending(function)), jax.jit(along, static_argnums=0)(function))


@pytest.mark.parametrize("function", [jnp.maximum, lambda x, y: jax.lax.cummax(x * y, axis=1)], ids=["two", "so far"])
def test_on_a_mesh_of_explicit_axes(function: Callable[..., Any]) -> None:
    value = lambda f: lambda x: jnp.sum(f(x, jnp.cos(x)) ** 2)  # noqa: E731
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(W, jax.P("rows", None))
        for compiled in (jax.jit, *([lambda f: f] if JAX_COMPARES_BITS else [])):  # JAX 0.12's own fails there (its 40875)
            ours, theirs = (compiled(jax.grad(f))(x) for f in (value(mending(function)), value(function)))
            assert jax.typeof(ours) == jax.typeof(x)
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_what_is_no_maximum_of_floats_stays_as_it_is() -> None:
    rule = jax.custom_jvp(lambda x: jnp.maximum(x, 0))
    rule.defjvps(lambda d, _, x: 2 * d)
    function = lambda x: rule(x) * jnp.maximum(jnp.argmax(x), 2)  # noqa: E731
    program = jax.make_jaxpr(mending(function))(jnp.ones(3))
    assert str(program) == str(jax.make_jaxpr(function)(jnp.ones(3)))
    assert contains(program.jaxpr, "max")


def test_none_is_left_to_a_jax_that_compares_bits() -> None:
    function = lambda x: jnp.maximum(x, 0) * jnp.minimum(x, 1)  # noqa: E731
    ours, theirs = (
        str(jax.make_jaxpr(jax.grad(lambda x, f=f: jnp.sum(f(x))))(jnp.ones(3))) for f in (mending(function), function)
    )
    assert " gt " in ours and (" gt " in theirs) != JAX_COMPARES_BITS
