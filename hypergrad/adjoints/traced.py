"""What a pass over the integers does under JAX's transformations: it has no derivative, and it is batched apart.

Invariant: called outside of them, a pass wrapped here is the pass.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hypergrad import _programs as programs
from hypergrad._settings import own_settings
from hypergrad.run.spec import Run


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Integers have no tangents: a derivative through the passes themselves would silently be zero. Raise instead."""

    @functools.wraps(function)
    def wrapped(run: Run, static: Any, *args: Any) -> Any:
        call = jax.custom_jvp(lambda *a: function(run, static, *a))

        @call.defjvp
        def refuse(primals: Any, tangents: Any) -> Any:
            raise TypeError(
                "a reversal (hg.Reversible, hg.Truncated, hg.Auto) has first derivatives only; this differentiates it a "
                "second time (or forwards, by jvp). Pass adjoint=hg.Unrolled() to hg.train for the runs that are "
                "differentiated twice. In a loss, where what a run comes to is a constant: jax.lax.stop_gradient around "
                "what goes into that run, not around what comes out."
            )

        return call(*args)

    return wrapped


def batched_apart(function: Callable[..., Any], forward: bool) -> Callable[..., Any]:
    """A pass that isolates its gradients when it is batched, by whatever nest of jit and vmap.

    Batched matrix products are fused with their surroundings more freely: from 8 seeds on, the gradient inside the jvp had
    other bits than in the forward pass, on a network that reverses exactly one seed at a time.
    """

    @functools.wraps(function)
    def wrapped(run: Run, static: Any, *args: Any) -> Any:
        if run.functions.collective or run.collective:
            # JAX has no batching rule of one's own around a named axis.
            return function(run.isolated(), static, *args)
        # A branch of a batched `jax.lax.cond` makes arrays that are closed over batched, which JAX's rule does not take.
        program, constants = programs.trace(lambda *a: function(run, static, *a), *args)
        call = jax.custom_batching.custom_vmap(lambda constants, *a: program(constants, *a))

        @call.def_vmap
        def batched(size: int, flags: Any, _: Any, *a: Any) -> Any:
            axes = flags[1:]
            a, axes = _with_all_values(size, axes, a) if forward else (a, axes)
            axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, axes)
            with own_settings():  # the rule may be called long after the context of the call is gone
                apart = lambda *a: function(run.isolated(), static, *a)  # noqa: E731
                out = jax.vmap(apart, in_axes=axes, axis_size=size)(*a)
            return out, jax.tree.map(lambda _: True, out)

        return call(constants, *args)

    return wrapped


def _with_all_values(size: int, axes: Any, arguments: Any) -> Any:
    """The forward pass's arguments and their flags, with all initial values batched, as all values are on the way back.

    What is batched may leave the parameters alone (the decay of a statistic does): their gradients would be computed once on
    the way there and in a batch on the way back.
    """
    (inputs,), (batched,) = arguments, axes
    each = lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (size, *x.shape))  # noqa: E731
    values, flags = jax.tree.map(each, inputs.values, batched.values), jax.tree.map(lambda _: True, batched.values)
    return (inputs._replace(values=values),), (batched._replace(values=flags),)
