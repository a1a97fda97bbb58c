"""Two ways to repeat a step: one compiled scan, or a host loop over a jitted (or, for host buffers, plain) step.

Invariant: a driver only repeats: `carry, ys = body(consts, carry, x)` for every x of xs, in order or in reverse.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


Body = Callable[[Any, Any, Any], tuple[Any, Any]]  # (consts, carry, x) -> (carry, y)


def scan(body: Body, consts: Any, carry: Any, xs: Any, reverse: bool = False) -> tuple[Any, Any]:
    return jax.lax.scan(lambda c, x: body(consts, c, x), carry, xs, reverse=reverse)


def host(body: Body, consts: Any, carry: Any, xs: Any, reverse: bool = False) -> tuple[Any, Any]:
    """A Python loop over the jitted step: XLA runs convolutions on all cores there, in a scan on one."""
    return _loop(jax.jit(body), consts, carry, xs, reverse)


def host_eager(body: Body, consts: Any, carry: Any, xs: Any, reverse: bool = False) -> tuple[Any, Any]:
    """A Python loop over the plain step, for buffers that live in Python."""
    return _loop(body, consts, carry, xs, reverse)


def _loop(body: Body, consts: Any, carry: Any, xs: Any, reverse: bool) -> tuple[Any, Any]:
    steps = jax.tree.leaves(xs)[0].shape[0]
    ys: list[Any] = [None] * steps
    for t in reversed(range(steps)) if reverse else range(steps):
        carry, ys[t] = body(consts, carry, jax.tree.map(lambda x: x[t], xs))  # noqa: B023 (used at once)
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)
