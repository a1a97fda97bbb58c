"""Values that are computed every k steps and held between, by a link that is set anew.

Invariant: the link stays as it is where it is held, and is 2^-16 of what it was plus 1 - 2^-16 of what is computed where it
is due: right to 1.5e-5 of the larger of the two, at 16/k bits an entry and step. So a value should not be far larger at one
time than at the next, as the root of a matrix is that is nearly zero.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.chain import Link, View


_HELD = "1 where values are held, 2^-16 where they are due"
_LEFT = 2.0**-16


def held_link(name: str, compute: Callable[..., Array], every: int, start: Callable[[Array], Array], wide: bool) -> Link:
    """compute(h, z, g): as an increment reads them; called where it is due alone."""

    def increment(h: View, z: View, g: Array) -> Array:
        like = jax.eval_shape(lambda: compute(h, z, g))
        due = lambda: (1 - _LEFT) * compute(h, z, g)  # noqa: E731
        return jax.lax.cond(h.due > 0, due, lambda: jnp.zeros(like.shape, like.dtype))

    increment.__module__ = compute.__module__  # one of a user's may compute something else at the next call
    return Link(name, increment, decay=_HELD, may_be_one=True, start=start, wide=wide, bits_a_step=16 / every)


def schedule(h: dict[str, Array], every: int, steps: int, first: int = 0) -> dict[str, Array]:
    """When values are due, for `prepare`: at steps first, first + k, first + 2k, .."""
    like: Any = h["learning_rate"]
    t = jnp.arange(steps).reshape(steps, *[1] * (like.ndim - 1))
    due = ((t >= first) & ((t - first) % every == 0)).astype(like.dtype)
    return {"due": due, _HELD: jnp.where(due > 0, jnp.asarray(_LEFT, like.dtype), 1)}
