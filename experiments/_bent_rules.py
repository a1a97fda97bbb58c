"""Derivative rules as users declare them, for the losses of the fuzzer: most are not the derivative of what they compute.

Functions of a value x of any shape, and mostly of a number s, whose own derivative is given as zero.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array


def of_two(back: Callable[[Array, Array, Array], Array]) -> Callable[[Array, Any], Array]:
    """(x, s) -> x, whose cotangent ct becomes back(x, s, ct)."""
    rule = jax.custom_vjp(lambda x, s: x)
    rule.defvjp(lambda x, s: (x, (x, s)), lambda kept, ct: (back(*kept, ct), jnp.zeros_like(kept[1])))
    return lambda x, s: rule(x, jnp.asarray(s, x.dtype))


turned = of_two(lambda x, s, ct: -s * ct)
limited = of_two(lambda x, s, ct: jnp.clip(ct, -(s**2) / 50, s**2 / 50))
scaled = of_two(lambda x, s, ct: s * ct)
lengthened = of_two(lambda x, s, ct: s * ct / jnp.sqrt(jnp.mean(ct * ct) + 1e-2))
leaned = of_two(lambda x, s, ct: ct * (1 + s * x))


@jax.custom_jvp
def _bell(x: Array, s: Array) -> Array:
    return jnp.tanh(x)


_bell.defjvp(lambda xs, ts: (jnp.tanh(xs[0]), ts[0] / (1 + xs[1] ** 2 * xs[0] ** 2)))


def bell(x: Array, s: Any) -> Array:
    return _bell(x, jnp.asarray(s, x.dtype))


@jax.custom_vjp
def rounded(x: Array) -> Array:
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


@jax.custom_jvp
def spike(x: Array) -> Array:
    return (x > 0).astype(x.dtype)


spike.defjvp(lambda xs, ts: (spike(xs[0]), ts[0] / (1 + jnp.abs(xs[0])) ** 2))


@jax.custom_vjp
def honest(x: Array) -> Array:
    return jnp.logaddexp(x, 0)


honest.defvjp(lambda x: (honest(x), x), lambda x, ct: (ct * jax.nn.sigmoid(x),))

# A function of JAX with a rule of the user's: nothing but the rule tells.
plus = jax.custom_jvp(jax.nn.softplus)
plus.defjvp(lambda xs, ts: (jax.nn.softplus(xs[0]), ts[0] / (1 + xs[0] ** 2)))
minus = jax.custom_jvp(jax.nn.relu)
minus.defjvps(lambda t, ans, x: t * jax.nn.sigmoid(3 * x) + 0 * ans)


@eqx.filter_custom_vjp
def _damped(given: Any) -> Any:
    return given[0]


@_damped.def_fwd
def _(perturbed: Any, given: Any) -> Any:
    return given[0], given[1]


@_damped.def_bwd
def _(s: Any, ct: Any, perturbed: Any, given: Any) -> Any:
    return ct / (1 + s**2 * ct**2), jnp.zeros_like(s)


def damped(x: Array, s: Any) -> Array:
    """By equinox."""
    return _damped((x, jnp.asarray(s, x.dtype)))


def half_turned(x: Array) -> Array:
    """By optax."""
    return optax.scale_gradient(x, -0.5)


def _equilibrium(x: Array, w: Array, tangent_solve: Callable[..., Any]) -> Array:
    def miss(z: Array) -> Array:
        return jnp.tanh(w * jnp.roll(z, 1) + x.reshape(-1)) - z

    def iterate(f: Any, z: Array) -> Array:
        return jax.lax.fori_loop(0, 5, lambda _, z: z + f(z), z)

    return jax.lax.custom_root(miss, jnp.zeros(x.size, x.dtype), iterate, tangent_solve).reshape(x.shape)


def equilibrium(x: Array, s: Any) -> Array:
    """A layer that is the solution of something, with the derivative of the solution."""
    dense = lambda g, b: jnp.linalg.solve(jax.jacobian(g)(b), b)  # noqa: E731
    return _equilibrium(x, 0.5 * jnp.tanh(jnp.asarray(s, x.dtype)), dense)


def free_equilibrium(x: Array, s: Any) -> Array:
    """The same, its linear system not solved but left away (Fung et al. 2022)."""
    return _equilibrium(x, 0.5 * jnp.tanh(jnp.asarray(s, x.dtype)), lambda g, b: -b)


def centred(x: Array, axis: int) -> Array:
    """A normalization: no rule."""
    x = x - jnp.mean(x, axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + 0.1)
