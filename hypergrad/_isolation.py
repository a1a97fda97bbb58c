"""What keeps XLA from rounding the same expression otherwise in two programs, or computing again what it could store.

Invariant: what is isolated has the same bits in every pass, whatever it is compiled with.

XLA simplifies and contracts float expressions by their context: a product that enters a sum may be fused with it in one pass
and not in the other. What stops which of its passes, and what it costs, is a table in docs/design.md.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun

from hypergrad import _programs as programs
from hypergrad._settings import own_settings


def isolated(t: Array, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), compiled apart from what surrounds it.

    t: the step, int32 []. That the branch is always taken, XLA does not see; and t is the same for all elements of a batch.
    Where Python runs the steps operation by operation it is a program of its own.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((t, args))):
        return behind_branch(t >= 0, function, *args)
    return programs.apart(function, *args)


def behind_branch(taken: Array | bool, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), computed apart and stored, and zeros if not `taken`: bool []."""
    arrays, rest = eqx.partition(args, eqx.is_array)
    traced, like = jax.make_jaxpr(lambda *a: function(*eqx.combine(a, rest)), return_shape=True)(*arrays)
    jaxpr, leaves = traced.jaxpr, jax.tree.leaves(arrays)
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *leaves], strict=True))
    results = [None if isinstance(v, Literal) else known.get(v) for v in jaxpr.outvars]  # what is computed: not what came in
    computed = [i for i, x in enumerate(results) if x is None]
    some = lambda *a: [x for i, x in enumerate(jaxpr_as_fun(traced)(*a)) if i in computed]  # noqa: E731
    nothing = lambda *_: [jnp.zeros(traced.out_avals[i].shape, traced.out_avals[i].dtype) for i in computed]  # noqa: E731
    for i, x in zip(computed, jax.lax.cond(taken, some, nothing, *leaves), strict=True):
        results[i] = x
    return jax.tree.unflatten(jax.tree.structure(like), results)


def unseen() -> Array:
    """True, which XLA does not see, and not batched under any vmap: for `behind_branch` outside of a loop. bool []."""
    return jax.lax.fori_loop(0, 2, lambda i, sum: sum + i, jnp.int32(0)) >= 0


def isolated_once(function: Callable[..., Any], *args: Any) -> Any:
    """`isolated`, outside of the loop over steps.

    In the open, XLA computes what is cheap again for each kernel that reads it. Parameters that a program draws had other
    bits in the certificate than in training: the polynomial of a normal distribution was part of both kernels.
    """
    return behind_branch(unseen(), function, *args)


def barrier(values: Any) -> Any:
    """An optimization barrier. XLA:CPU drops it before it fuses: what must be stored, or keep its bits, is `isolated`."""
    return jax.lax.optimization_barrier(values)


def stored(t: Array, x: Array) -> Array:
    """x, by a choice that is always the same: a sum over it does not pull in what makes it.

    XLA:CPU's library for sums would, so that what x is made of, decoded integers among it, is stored instead, and summed at
    three to five times the cost.
    """
    return jnp.where(t >= 0, x, 0)


def wanting(t: Array, value: Array, others: list[Array]) -> Array:
    """value, of a program that needs the others, too.

    XLA takes out of a branch what nobody uses of its results, as the gradient of a frozen leaf on the way back, and what is
    left it fuses otherwise. Reads one entry of each.
    """
    for x in others:
        value = jnp.where(t >= 0, value, jnp.ravel(x)[0].astype(value.dtype)) if x.size else value
    return value


@jax.custom_batching.custom_vmap
def once_known(t: Array, value: Array, scalars: list[Array]) -> Array:
    """value, to be overwritten when the scalars have been made of it: less a zero, which takes a kernel less time than a
    choice.

    It is not batched where they alone are: many derivatives of one run, as `jax.jacrev` takes, have one state. Each would
    have one of its own, and XLA computes gradients at a batch of states to other bits.
    """
    zero = [jnp.where(t >= 0, 0, x.reshape(()).astype(value.dtype)) for x in scalars]
    return value - sum(zero[1:], zero[0]) if zero else value


@once_known.def_vmap
def _batched_once_known(size: int, axes: Any, t: Array, value: Array, scalars: list[Array]) -> tuple[Array, bool]:
    first = lambda x, is_batched: x[0] if is_batched else x  # noqa: E731 (which is made when all are)
    _, is_batched, _ = axes
    with own_settings():  # the rule may be called long after the context of the call is gone
        t, scalars = jax.tree.map(first, (t, scalars), (axes[0], axes[2]))
        return once_known(t, value, scalars), is_batched


SMALL_LOOP = 2**16  # bytes that a loop holds: XLA:CPU takes some kilobytes for small


def kernel_by_kernel(t: Array, held: Any) -> Array:
    """t, in a way that keeps the steps of a loop that holds this little from becoming one kernel.

    XLA:CPU compiles a small loop as a single function of LLVM, branches and all, which contracts across them: with up to
    eight weights, losses of sines did not come back. It cannot compile a sort so.
    """
    small = sum(jnp.size(x) * jnp.result_type(x).itemsize for x in jax.tree.leaves(held)) < SMALL_LOOP
    return jax.lax.sort(jnp.stack([t, t + 1]))[0] if small else t


_PRODUCTS = {"mul", "square", "integer_pow", "neg", "broadcast_in_dim", "reshape", "convert_element_type"}


def only_products(program: Jaxpr) -> bool:
    """Whether nothing but products is made of what goes in, which are rounded alike wherever they stand. What is computed of
    scalars alone is stored before the kernels of arrays."""
    scalar = lambda e: all(not x.aval.shape for x in (*e.invars, *e.outvars))  # noqa: E731
    return all(e.primitive.name in _PRODUCTS or (e.primitive.name in ("add", "sub") and scalar(e)) for e in program.eqns)
