"""Weight decay beside what the optimizer adds: w <- (1 - a weight_decay) w + increment (Loshchilov and Hutter 2019)."""

from collections.abc import Callable

from jax import Array

from hypergrad.exact import FINE_DENOMINATOR
from hypergrad.optimizers.chain import PARAMS, Link


_KEPT = "1 - learning_rate * weight_decay"  # as errors name it


def decaying(increment: Callable[..., Array]) -> Link:
    """The link of parameters that decay by themselves, by what `decay_of` adds to h."""
    return Link(PARAMS, increment, decay=_KEPT, denominator=FINE_DENOMINATOR, may_be_one=True, bits_a_step=1 / 16)


def decay_of(h: dict[str, Array]) -> dict[str, Array]:
    """For `prepare`. 1 - a weight_decay is rounded to a multiple of 2^-24 in (0, 1]."""
    return {_KEPT: 1 - h["learning_rate"] * h["weight_decay"]}
