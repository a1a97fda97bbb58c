"""Weight decay beside what the optimizer adds: w <- (1 - a weight_decay) w + increment (Loshchilov and Hutter 2019)."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from hypergrad.exact import FINE_DENOMINATOR, kept_on_average
from hypergrad.optimizers.chain import PARAMS, Link


_KEPT = "1 - learning_rate * weight_decay"  # as errors name it
LOST = "learning_rate * weight_decay"


def decaying(increment: Callable[..., Array]) -> Link:
    """The link of parameters that decay by themselves, by what `decay_of` adds to h."""
    return Link(PARAMS, increment, decay=_KEPT, denominator=FINE_DENOMINATOR, may_be_one=True, bits_a_step=1 / 16)


def decay_of(h: dict[str, Array], steps: int) -> dict[str, Array]:
    """For `prepare`. 1 - a weight_decay is a multiple of 2^-24 in (0, 1], whose sums over steps are those of what it stands
    for; where each weight has one that all steps share, it is rounded to the nearest."""
    lost = h["learning_rate"] * h["weight_decay"]
    return {_KEPT: kept(lost, steps), LOST: lost}


def kept(lost: Array, steps: int) -> Array:
    """1 - lost for a link like `decaying`: [steps | 1, ...]."""
    one = lost.size == lost.shape[0]  # of all weights
    return kept_on_average(jnp.broadcast_to(lost, (steps, *lost.shape[1:])) if one else lost, FINE_DENOMINATOR)
