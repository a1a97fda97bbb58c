"""Programs without calls and without duplicates: one form, whatever passes of XLA come first.

Invariant: what comes out computes what goes in, operation by operation.

XLA makes a quotient by a sum a product with its inverse, which is rounded otherwise, where nobody else reads the sum spread
out to that shape. Programs for several devices are rid of duplicates before that, and those for one after it: the same
softmax had other bits.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from hypergrad._lifted import interpreted
from hypergrad._program_keys import parameters_key


def once_each(function: Callable[..., list[Array]], *args: Any) -> list[Array]:
    """function(*args), each of its operations once."""
    traced = jax.make_jaxpr(function)(*args)
    leaves = jax.tree.leaves(args)
    spread = jax.make_jaxpr(lambda *leaves: interpreted(traced.jaxpr, traced.consts, leaves, _in_line))(*leaves)
    return jaxpr_as_fun(without_duplicates(spread))(*leaves)


# Of which JAX takes arguments of one row or column for those of many.
_ENTRYWISE = {
    "add", "add_any", "and", "atan2", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "nextafter", "or",
    "pow", "rem", "select_n", "sub", "xor",
}  # fmt: skip


def _in_line(e: JaxprEqn, arrays: list[Any]) -> list[Any] | None:
    """The results of a call of `jax.jit`, or of what spreads its arguments out by itself; None: of neither."""
    if e.primitive.name == "jit":
        inner = e.params["jaxpr"]
        return interpreted(inner.jaxpr, inner.consts, arrays, _in_line)
    shape = getattr(e.outvars[0].aval, "shape", ()) if e.outvars else ()
    if e.primitive.name not in _ENTRYWISE or all(np.shape(x) == shape for x in arrays):
        return None
    same = [x if np.shape(x) in (shape, ()) else jax.lax.broadcast_in_dim(x, shape, range(len(shape))) for x in arrays]
    return [e.primitive.bind(*same, **e.params)]


def without_duplicates(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Each operation of a program once."""
    made: dict[Any, list[Var]] = {}
    equations: list[JaxprEqn] = []
    known: dict[Any, Any] = {x: x for x in (*closed.jaxpr.constvars, *closed.jaxpr.invars)}
    look = lambda x: x if isinstance(x, Literal) else known[x]  # noqa: E731
    for e in closed.jaxpr.eqns:
        given = [look(x) for x in e.invars]
        key = e.primitive, tuple(map(_name, given)), parameters_key(e)
        results = None if e.effects else made.get(key)
        if results is None:
            results = made[key] = [Var(x.aval) for x in e.outvars]
            equations.append(e.replace(invars=given, outvars=results))
        known.update(zip(e.outvars, results, strict=True))
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations, outvars=[look(x) for x in closed.jaxpr.outvars]), closed.consts)


def _name(x: Any) -> Any:
    """Equal for what has the same value."""
    return (str(x.aval), np.asarray(x.val).tobytes()) if isinstance(x, Literal) else id(x)
