"""Which equations of a loss declare a derivative that is not JAX's own, and which a batching rule.

Invariant: a rule passes as JAX's own only if the function that has it, and all the Python that the rule is made of, stands
in JAX's files. What cannot be told passes as the user's, which costs time and never a derivative.
"""

import contextlib
import functools
import inspect
import os
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, primitives


_FOLDER = f"{pathlib.Path(inspect.getfile(jax)).parent}{os.sep}"
# JAX's function, of which the derivative is as good as the user's solver of the linear system is.
_SOLVED_BY_USER = "_custom_root at "
# Whose derivative rules are those of what they compute. A `custom_vjp`, a solver with a rule, a call to other code: not
# these.
_PRIMITIVES = {
    x
    for x in vars(primitives).values()
    if isinstance(x, Primitive) and x.name not in ("custom_vjp_call", "custom_lin", "custom_linear_solve")
}
_NAMES = {
    "debug_callback", "debug_print", "layout_constraint", "optimization_barrier", "pvary", "ragged_dot_general",
    "random_unwrap", "random_wrap", "reshard", "scatter-sub", "shard_map", "split", "stack", "tile", "unstack",
}  # fmt: skip


def own_rule(equation: Any) -> bool:
    """Whether a derivative is declared here that is not JAX's own."""
    name = equation.primitive.name
    if name == "custom_jvp_call":
        source = equation.params["call_jaxpr"].jaxpr.debug_info.func_src_info or ""
        of_jax = f" at {_FOLDER}" in source and not source.startswith(_SOLVED_BY_USER)
        return not (of_jax and _made_by_jax(equation.params.get("jvp_jaxpr_fun")))
    return equation.primitive not in _PRIMITIVES and name not in _NAMES and any(map(is_float, equation.outvars))


def own_batching(equation: Any) -> bool:
    """Whether it is declared here what `jax.vmap` makes of a function, by a rule that the program does not show."""
    return equation.primitive.name == "custom_vmap_call"


def is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x.aval, "dtype", jnp.int32), jnp.inexact)


def _made_by_jax(rule: Any) -> bool:
    """rule: as an equation holds it, the function itself behind what JAX has wrapped around it."""
    wanted = getattr(getattr(rule, "debug_info", None), "func_src_info", None)
    reached = False
    for function in _callables(rule):
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_FOLDER):
            return False
        reached |= wanted == f"{function.__name__} at {code.co_filename}:{code.co_firstlineno}"
    return reached


def _callables(root: Any) -> Iterator[Any]:
    """Functions that `root` is made of, itself included, and callables that nobody can look into."""
    left: list[Any] = [root]
    seen: list[Any] = []
    while left:
        x = left.pop()
        if any(x is known for known in seen):
            continue
        seen.append(x)
        if isinstance(x, types.FunctionType):
            yield x
            left += [inspect.unwrap(x), *_enclosed(x)]
        elif isinstance(x, functools.partial):
            left += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, (tuple, list)):
            left += x
        elif hasattr(x, "transforms") and hasattr(x, "f"):  # JAX's own wrapper of functions
            left.append(x.f)
        elif callable(x) and hasattr(x, "__wrapped__"):
            left.append(x.__wrapped__)
        elif callable(x) and not isinstance(x, type):
            yield x


def _enclosed(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # one that is empty yet
            yield cell.cell_contents
