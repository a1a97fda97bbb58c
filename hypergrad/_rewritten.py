"""Programs with some of their equations replaced, also inside of loops, branches and calls.

Invariant: a program in which nothing is replaced is the one that came in.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


# (an equation, its program) -> what stands for it: another, or itself as it is; None: itself, with what is inside rewritten.
Replace = Callable[[Any, Jaxpr], Any]


def rewritten(jaxpr: Jaxpr, replace: Replace) -> Jaxpr:
    found = [_equation(e, jaxpr, replace) for e in jaxpr.eqns]
    return jaxpr if _same(found, jaxpr.eqns) else jaxpr.replace(eqns=found)


def _equation(e: Any, jaxpr: Jaxpr, replace: Replace) -> Any:
    with e.ctx.manager:  # what stands for it is of the mesh that it is of, whichever is in force now
        other = replace(e, jaxpr)
    if other is not None:
        return other
    found = [_inside(x, replace) for x in e.params.values()]
    return e if _same(found, e.params.values()) else e.replace(params=dict(zip(e.params, found, strict=True)))


def _inside(value: Any, replace: Replace) -> Any:
    """The same for the programs that a parameter of an equation holds."""
    if isinstance(value, ClosedJaxpr):
        inner = rewritten(value.jaxpr, replace)
        return value if inner is value.jaxpr else value.replace(jaxpr=inner)
    if isinstance(value, Jaxpr):
        return rewritten(value, replace)
    if isinstance(value, tuple):
        found = [_inside(x, replace) for x in value]
        return value if _same(found, value) else type(value)(*found) if hasattr(value, "_fields") else tuple(found)
    return value


def _same(found: list[Any], given: Any) -> bool:
    return all(x is y for x, y in zip(found, given, strict=True))


def through(rewrite: Callable[[Jaxpr], Jaxpr], function: Callable[..., Any]) -> Callable[..., Any]:
    """function as the rewritten program. Of its arguments all that is no array is fixed."""

    def wrapped(*args: Any) -> Any:
        arrays, rest = eqx.partition(args, eqx.is_array)
        closed, out = jax.make_jaxpr(lambda a: function(*eqx.combine(a, rest)), return_shape=True)(arrays)
        found = jax.core.eval_jaxpr(rewrite(closed.jaxpr), closed.consts, *jax.tree.leaves(arrays))
        return jax.tree.unflatten(jax.tree.structure(out), found)

    return wrapped
