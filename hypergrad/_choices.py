"""Maxima and minima whose derivative is that of the larger, or smaller, argument.

Before 0.11.2 JAX asks of each argument whether it equals the result, bit by bit. XLA may compute an argument twice, and
round 1 + x^2 once in one place and twice in the other: then neither is equal, and the derivative is zero without a word. So
the two arguments are compared with each other, as later versions of JAX do.

Invariant: values keep their bits, derivatives are JAX's: half of one each where both are equal, none where one is NaN.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, primitives

from hypergrad._own_rules import is_float
from hypergrad._rewritten import rewritten


JAX_COMPARES_BITS = jax.__version_info__ < (0, 11, 2)


@jax.custom_jvp
def larger(x: Array, y: Array) -> Array:
    """max(x, y), entry by entry."""
    return jax.lax.max(x, y)


@jax.custom_jvp
def smaller(x: Array, y: Array) -> Array:
    """min(x, y), entry by entry."""
    return jax.lax.min(x, y)


def _larger_jvp(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    x, y = primals
    return larger(x, y), _shared(x > y, x < y, x == y, *tangents)


def _smaller_jvp(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    x, y = primals
    return smaller(x, y), _shared(x < y, x > y, x == y, *tangents)


larger.defjvp(_larger_jvp, symbolic_zeros=True)
smaller.defjvp(_smaller_jvp, symbolic_zeros=True)


def _shared(first: Array, second: Array, same: Array, dx: Any, dy: Any) -> Array:
    """dx where the first was chosen, dy where the second was, and half of both where they are the same."""
    share = lambda chosen, d: d * jnp.where(chosen, 1, jnp.where(same, 0.5, 0)).astype(d.dtype)  # noqa: E731
    parts = [share(chosen, d) for chosen, d in ((first, dx), (second, dy)) if not isinstance(d, SymbolicZero)]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _running(choose: Callable[..., Array]) -> Callable[..., Any]:
    """Of JAX's maximum so far: its derivative takes one of two at a time, too."""
    return lambda axis, reverse: jax.jit(lambda x: jax.lax.associative_scan(choose, x, axis=axis, reverse=reverse))


# To functions of the same arguments, from the parameters of an equation.
_CHOICES: dict[Any, Callable[..., Any]] = {
    primitives.max_p: lambda: larger,
    primitives.min_p: lambda: smaller,
    primitives.cummax_p: _running(larger),
    primitives.cummin_p: _running(smaller),
}
# What has a derivative rule is differentiated by it alone; the last is a program for each device.
_OPAQUE = ("custom_jvp_call", "custom_vjp_call", "shard_map")


def fair_choices(jaxpr: Jaxpr) -> Jaxpr:
    """A program that computes the same, and its maxima and minima have those derivatives."""
    return rewritten(jaxpr, _equation) if JAX_COMPARES_BITS else jaxpr


def _equation(e: Any, _: Jaxpr) -> Any:
    make = _CHOICES.get(e.primitive)
    if make is None or not is_float(e.outvars[0]):
        return e if e.primitive.name in _OPAQUE else None
    with jax.disable_jit(False):
        (call,) = jax.make_jaxpr(make(**e.params))(*(x.aval for x in e.invars)).jaxpr.eqns
    return e.replace(primitive=call.primitive, params=call.params)
