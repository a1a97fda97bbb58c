"""Reports out of compiled code: a callback, or outputs of the program that is made of a function here.

Invariant: each report is made once, to its `tell`: by the callback where the program is anybody's, by whoever runs the
program where `lifted` made it. JAX keeps no program with a callback in its persistent compilation cache.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Jaxpr, Literal, Primitive
from jax.interpreters import batching, mlir


Tell = Callable[..., np.ndarray]  # of the arrays of a report: whether all is well, of the shape of the first of them

_report = Primitive("hypergrad_report")


def report(tell: Tell, code: Array, *others: Array) -> Array:
    """tell(code, *others), bool of code's shape, when the program runs. tell: hashable, equal ones being one program."""
    return _report.bind(code, *others, tell=tell)


@_report.def_abstract_eval
def _shaped(code: Any, *others: Any, tell: Tell) -> Any:
    return jax.core.ShapedArray(code.shape, jnp.dtype(bool))


def _batched(arrays: Any, axes: Any, tell: Tell) -> tuple[Any, int]:
    (size,) = {x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None}
    first = lambda x, axis: jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)  # noqa: E731
    return _report.bind(*map(first, arrays, axes), tell=tell), 0


@functools.partial(jax.jit, static_argnames="tell")
def _called_back(*arrays: Any, tell: Tell) -> Array:
    shape = jax.ShapeDtypeStruct(arrays[0].shape, jnp.bool_)
    return jax.pure_callback(tell, shape, *arrays)


_report.def_impl(_called_back)
batching.primitive_batchers[_report] = _batched
mlir.register_lowering(_report, mlir.lower_fun(_called_back, multiple_results=False))


def lifted(function: Callable[..., Any], tells: list[Tell], well: Callable[[Any], Any]) -> Callable[..., Any]:
    """(function(*args), the arrays of each report), to be traced once; tells: gets whom to tell them, in the same order.

    well(code): whether all is well, for the program itself to know. Reports inside of loops and branches stay callbacks,
    since the program would not know how many there are.
    """

    def wrapped(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(lambda *a: function(*a), return_shape=True)(*args)
        found: list[tuple[Any, ...]] = []

        def special(e: Any, arrays: list[Any]) -> list[Any] | None:
            if e.primitive is _report:
                tells.append(e.params["tell"])
                found.append(tuple(arrays))
                return [well(arrays[0])]
            if e.primitive.name == "jit" and _reports(e.params["jaxpr"].jaxpr):
                inner = e.params["jaxpr"]
                return interpreted(inner.jaxpr, inner.consts, arrays, special)
            return None

        results = interpreted(closed.jaxpr, closed.consts, jax.tree.leaves(args), special)
        return jax.tree.unflatten(jax.tree.structure(out), results), found

    return wrapped


def _reports(jaxpr: Jaxpr) -> bool:
    """Whether there is a report in the program that could be lifted."""
    inner = (e.params["jaxpr"].jaxpr for e in jaxpr.eqns if e.primitive.name == "jit")
    return any(e.primitive is _report for e in jaxpr.eqns) or any(map(_reports, inner))


def interpreted(jaxpr: Jaxpr, constants: list[Any], leaves: Any, special: Callable[[Any, list[Any]], Any]) -> list[Any]:
    """The program's results; special(equation, its arguments): its results, or None where it is to be evaluated as it is."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *leaves), strict=True))
    read = lambda x: x.val if isinstance(x, Literal) else known[x]  # noqa: E731
    for e in jaxpr.eqns:
        results = special(e, [read(x) for x in e.invars])
        if results is None:
            variables = list(dict.fromkeys(x for x in e.invars if not isinstance(x, Literal)))
            alone = jaxpr.replace(constvars=[], invars=variables, eqns=[e], outvars=e.outvars)
            results = jax.core.eval_jaxpr(alone, [], *map(read, variables))
        known.update(zip(e.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]
