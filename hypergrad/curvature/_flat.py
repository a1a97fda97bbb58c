"""The loss of one example as a program without calls: every equation stands on one level, where it can be looked at.

Invariant: the flat program computes what the loss computes; only `jit`, `checkpoint` and short `scan`s are taken apart, none
of which changes a derivative. What has a derivative rule of its own stays whole.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from hypergrad import _programs as programs
from hypergrad._lifted import interpreted


UNROLLED = 4096  # equations: a scan of no more is written out, step by step
LAYER, LIKELIHOOD = "hypergrad_layer_", "hypergrad_likelihood_"  # calls and scopes that say what is in them
OPTAX = {
    "softmax_cross_entropy": "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels": "softmax_cross_entropy",
    "sigmoid_binary_cross_entropy": "sigmoid_cross_entropy",
    "squared_error": "squared_error",
    "l2_loss": "half_squared_error",
}


@dataclasses.dataclass(frozen=True)
class Flat:
    """jaxpr: (constants, parameters, all other leaves) -> the loss of a batch of one example, and nothing else."""

    program: programs.Program
    jaxpr: Jaxpr
    constants: int
    parameters: int
    thetas: int

    @property
    def equations(self) -> list[Any]:
        return list(self.jaxpr.eqns)

    @property
    def weights(self) -> list[Any]:
        """The variables of the parameters' leaves."""
        return list(self.jaxpr.invars[self.constants : self.constants + self.parameters])


def flatten(loss: Callable[..., Any], params: Any, theta: Any, batch: Any) -> tuple[Flat, list[Any]]:
    """The loss of one of the batch's examples, and the arrays that it closes over."""
    _arrays(params=params, theta=theta, batch=batch)
    examples(batch)
    _real(params)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), batch)
    program, constants = programs.trace(loss, params, theta, one)
    if [x.shape for x in jax.tree.leaves(program.out)] != [()]:
        raise TypeError(f"`loss` must return one scalar; it returned {program.out}.")
    variables: Any = (*program.jaxpr.constvars, *program.jaxpr.invars)
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in variables]
    closed = jax.make_jaxpr(lambda *leaves: _inlined(program.jaxpr, leaves[: len(constants)], leaves[len(constants) :]))(
        *shapes
    )
    jaxpr = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
    constants = [*closed.consts, *constants]
    return Flat(program, jaxpr, len(constants), *(len(jax.tree.leaves(x)) for x in (params, theta))), constants


def _arrays(**given: Any) -> None:
    for name, tree in given.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            dtype = getattr(x, "dtype", None)
            texts = isinstance(dtype, np.dtype) and dtype.kind in "USO"
            if texts or not (dtype is not None or eqx.is_array_like(x)):
                raise TypeError(
                    f"{name}{jax.tree_util.keystr(path)} is {type(x).__name__} {x!r}, and curvature is of a loss of arrays "
                    "and numbers. Leave it out, and let the loss close over it (functools.partial)."
                )


def examples(batch: Any) -> int:
    """How many there are."""
    sizes = {jax.tree_util.keystr(path): jnp.shape(x)[:1] for path, x in jax.tree_util.tree_leaves_with_path(batch)}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        raise ValueError(
            f"each leaf of `batch` must have the examples as its leading axis; the leading axes are {sizes}. What belongs "
            "to no example, such as the key of a step, is no part of a batch here: let the loss close over it."
        )
    count = next(iter(sizes.values()))[0]
    if not count:
        raise ValueError("`batch` has no examples: its leading axes are of size 0. A mean over none is no number.")
    return count


def _real(params: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} is {jnp.result_type(x)}, and curvature is of real floats. Convert it, "
                "or give the loss what is no parameter as `theta`."
            )


def _inlined(jaxpr: Jaxpr, constants: Any, leaves: Any) -> list[Any]:
    def special(e: Any, arrays: list[Any]) -> list[Any] | None:
        name, kind = e.primitive.name, likelihood_of(e)
        if name == "jit" and kind is not None:  # what is called of it may have been traced elsewhere
            with jax.named_scope(f"{LIKELIHOOD}{kind}"):
                return _inlined(e.params["jaxpr"].jaxpr, e.params["jaxpr"].consts, arrays)
        if name == "jit" and not e.params["name"].startswith(LAYER):
            return _inlined(e.params["jaxpr"].jaxpr, e.params["jaxpr"].consts, arrays)
        if name in ("checkpoint", "remat2"):
            return _inlined(e.params["jaxpr"], [], arrays)
        if name == "scan" and 0 < e.params["length"] * len(e.params["jaxpr"].jaxpr.eqns) <= UNROLLED:
            return _unrolled(e.params, arrays)
        return None

    return interpreted(jaxpr, list(constants), list(leaves), special)


def likelihood_of(e: Any) -> str | None:
    """The likelihood that an equation is a part of: declared, or one of optax's functions."""
    if e.primitive.name == "jit" and e.params["name"].startswith(LIKELIHOOD):
        return e.params["name"].removeprefix(LIKELIHOOD)
    if e.primitive.name == "jit" and e.params["name"] == "log_softmax" and _is_jax_log_softmax(e):
        return "log_softmax"
    scopes = [x for x in str(e.source_info.name_stack).split("/") if x.startswith(LIKELIHOOD)]
    if scopes:
        return scopes[0].removeprefix(LIKELIHOOD)
    trace = e.source_info.traceback
    names = [f.function_name for f in trace.frames if "/optax/losses/" in f.file_name] if trace is not None else []
    known = [OPTAX[name] for name in names if name in OPTAX]
    return known[-1] if known else None  # the outermost: half of a squared error calls the squared error


def _is_jax_log_softmax(e: Any) -> bool:
    """Whether it is JAX's, along the last axis."""
    inner = e.params["jaxpr"].jaxpr
    source, last = inner.debug_info.func_src_info or "", e.invars[0].aval.ndim - 1
    maxima = [x.params["axes"] for x in inner.eqns if x.primitive.name == "reduce_max"]
    return f"{os.sep}jax{os.sep}_src{os.sep}nn{os.sep}" in source and maxima == [(last,)] and len(e.invars) == 1


def _unrolled(of: dict[str, Any], arrays: list[Any]) -> list[Any]:
    """The results of a scan: its last carry, and what its steps gave, stacked."""
    inner, first = of["jaxpr"], of["num_consts"]
    fixed, carry, rows = arrays[:first], arrays[first : first + of["num_carry"]], arrays[first + of["num_carry"] :]
    order = range(of["length"])[:: -1 if of["reverse"] else 1]
    found: dict[int, list[Any]] = {}
    for t in order:
        row = [jax.lax.squeeze(jax.lax.slice_in_dim(x, t, t + 1), (0,)) for x in rows]
        results = _inlined(inner.jaxpr, inner.consts, [*fixed, *carry, *row])
        carry, found[t] = results[: len(carry)], results[len(carry) :]
    stacked = [jax.numpy.stack(x) for x in zip(*(found[t] for t in sorted(found)), strict=True)]
    return [*carry, *stacked]
