"""Programs as runs compute them: what JAX or jaxlib gets wrong is done another way.

Invariant: of the loss, of an optimizer's signals, rules and transformations, and of a metric nothing runs that has not
passed here. What a derivative rule of the user's computes is not seen, nor maxima within `jax.shard_map`.
"""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Jaxpr

from hypergrad._choices import fair_choices
from hypergrad._cpu_kernels import careful_kernels
from hypergrad._rewritten import through


def mended(jaxpr: Jaxpr) -> Jaxpr:
    """A program that computes the same, and has the same derivatives."""
    return careful_kernels(fair_choices(jaxpr))


def mending(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a function."""
    return through(mended, function)
