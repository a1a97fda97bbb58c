"""Programs as runs compute them: what JAX or jaxlib gets wrong is done another way.

Invariant: of the loss, of an optimizer's signals, rules and transformations, and of a metric nothing runs that has not
passed here. What a derivative rule of the user's computes is not seen.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.extend.core import Jaxpr

from hypergrad._choices import fair_choices
from hypergrad._cpu_kernels import careful_kernels


def mended(jaxpr: Jaxpr) -> Jaxpr:
    """A program that computes the same, and has the same derivatives."""
    return careful_kernels(fair_choices(jaxpr))


def mending(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a function of arrays, and of what else is in its arguments."""

    def wrapped(*args: Any) -> Any:
        arrays, rest = eqx.partition(args, eqx.is_array)
        closed, out = jax.make_jaxpr(lambda a: function(*eqx.combine(a, rest)), return_shape=True)(arrays)
        found = jax.core.eval_jaxpr(mended(closed.jaxpr), closed.consts, *jax.tree.leaves(arrays))
        return jax.tree.unflatten(jax.tree.structure(out), found)

    return wrapped
