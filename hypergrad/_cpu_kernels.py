"""Kernels that jaxlib has for a CPU, called as they can be.

jaxlib (0.10.2) divides a batch of factorizations, or of triangular systems, among the threads that run the program, and
waits for them. Where as many batches are computed at a time as there are threads, two on two cores, all wait and none works:
the program never ends. So a large batch is computed one matrix after the other. And its Fourier transform takes arrays by
rows, which XLA does not know: where it would hand over a transposed one, as in the derivative of a transform of
`jnp.linalg.inv`, the program ends in an error. So the order is asked for.

Invariant: of what a run computes, neither a large batch nor the order of a transform is left to jaxlib, under `jax.vmap` and
in derivatives neither. What a derivative rule of the user's computes is not seen here.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Jaxpr, Literal, Primitive, primitives
from jax.interpreters import ad, batching, mlir

from hypergrad._program_keys import programs_in
from hypergrad._rewritten import rewritten, through


_KERNELS = {
    primitives.cholesky_p, primitives.eigh_p, primitives.householder_product_p, primitives.lu_p, primitives.qr_p,
    primitives.svd_p, primitives.triangular_solve_p, primitives.fft_p,
}  # fmt: skip
_RULED = primitives.custom_jvp_call_p  # as `jnp.linalg.slogdet`, whose rule solves
_LARGE = 60_000  # a batch times the cube of a side: 65,000 is computed by one thread, 500,000 by several

# alone: a program of one equation, one of those or a function that has one and a derivative rule. All that JAX does with
# the primitive is done with this program, and rewritten.
_careful = Primitive("hypergrad_careful_kernel")
_careful.multiple_results = True


def careless(jaxpr: Jaxpr) -> bool:
    """Whether the program has a batch, or a transform, that is left to jaxlib."""
    inside = lambda e: e.primitive is not _careful and any(map(careless, programs_in(tuple(e.params.values()))))  # noqa: E731
    return any(e.primitive in _KERNELS or inside(e) for e in jaxpr.eqns)


def careful_kernels(jaxpr: Jaxpr) -> Jaxpr:
    """A program that computes the same: large batches one matrix after the other, transforms of arrays that lie by rows."""
    if jax.default_backend() != "cpu":
        return jaxpr
    return rewritten(jaxpr, _equation)


def _equation(e: Any, jaxpr: Jaxpr) -> Any:
    if e.primitive in _KERNELS or (e.primitive is _RULED and careless(e.params["call_jaxpr"].jaxpr)):
        variables = list(dict.fromkeys(x for x in e.invars if not isinstance(x, Literal)))
        alone = jaxpr.replace(constvars=[], invars=variables, eqns=[e], outvars=e.outvars)
        return e.replace(primitive=_careful, invars=variables, params={"alone": alone})
    if e.primitive is _careful or e.primitive.name == "shard_map":  # the second: a program for each device
        return e
    return None


def carefully(function: Callable[..., Any]) -> Callable[..., Any]:
    """function, its large batches one matrix after the other, its transforms by rows."""
    return through(careful_kernels, function)


def _plain(alone: Jaxpr, *arrays: Array) -> list[Array]:
    return jax.core.eval_jaxpr(alone, [], *arrays)


def _each(*arrays: Array, alone: Jaxpr) -> list[Array]:
    (e,) = alone.eqns
    if e.primitive is _RULED:  # what it computes, without the rule
        inner, given = e.params["call_jaxpr"], dict(zip(alone.invars, arrays, strict=True))
        arguments = [x.val if isinstance(x, Literal) else given[x] for x in e.invars]
        return jax.core.eval_jaxpr(careful_kernels(inner.jaxpr), inner.consts, *arguments)
    if e.primitive is primitives.fft_p:
        return [_by_rows(y) for y in _plain(alone, *map(_by_rows, arrays))]
    lead = arrays[0].shape[:-2]
    batch = math.prod(lead)
    side = max(side for x in arrays for side in x.shape[len(lead) :])
    if batch == 1 or batch * side**3 <= _LARGE:
        return _plain(alone, *arrays)
    flat = [x.reshape(batch, *x.shape[len(lead) :]) for x in arrays]
    found = jax.lax.map(lambda xs: _plain(alone, *xs), flat)
    return [x.reshape(*lead, *x.shape[1:]) for x in found]


def _by_rows(x: Array) -> Array:
    """x, in an array whose last axis is contiguous."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _derivative(primals: Any, tangents: Any, alone: Jaxpr) -> Any:
    moved = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def rule(primals: Any, along: list[Array]) -> Any:
        function = lambda *moving: _plain(alone, *_filled(primals, moved, moving))  # noqa: E731
        return jax.jvp(function, [primals[i] for i in moved], along)

    return carefully(rule)(primals, [tangents[i] for i in moved])


def _transpose(cotangents: Any, *args: Any, alone: Jaxpr) -> list[Any]:
    linear = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    known = [None if i in linear else x for i, x in enumerate(args)]

    def rule(cotangents: Any, known: Any) -> Any:
        function = lambda *moving: _plain(alone, *_filled(known, linear, moving))  # noqa: E731
        return jax.linear_transpose(function, *(args[i].aval for i in linear))(cotangents)

    return _filled([None] * len(args), linear, carefully(rule)(cotangents, known))


def _filled(values: Any, places: list[int], others: Any) -> list[Any]:
    given = dict(zip(places, others, strict=True))
    return [given.get(i, x) for i, x in enumerate(values)]


def _batched(arrays: Any, axes: Any, alone: Jaxpr) -> Any:
    found = carefully(jax.vmap(functools.partial(_plain, alone), in_axes=tuple(axes)))(*arrays)
    return found, [0] * len(found)


_careful.def_abstract_eval(lambda *_, alone: [x.aval for x in alone.outvars])
_careful.def_impl(_each)
ad.primitive_jvps[_careful] = _derivative
ad.primitive_transposes[_careful] = _transpose
batching.primitive_batchers[_careful] = _batched
mlir.register_lowering(_careful, mlir.lower_fun(_each, multiple_results=True))


def eigh(a: Array) -> tuple[Array, Array]:
    """(w, Q) of symmetric A = Q diag(w) Q^T, w ascending: [.., n, n] -> [.., n], [.., n, n].

    One matrix after the other on a CPU, under `jax.vmap` too.
    """
    w, q = carefully(functools.partial(jnp.linalg.eigh, symmetrize_input=False))(a)
    return w, q
