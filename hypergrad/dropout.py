"""Dropout whose rate can be learned.

Invariant: a unit counts as kept, its mask above 1/2, with probability 1 - rate, at every temperature.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.batches import check_key
from hypergrad.hypers import Domain, describe
from hypergrad.schedules import Knots, PerStep


def concrete_dropout(key: Array, x: Array, rate: Any, temperature: float = 0.1) -> Array:
    """x m / (1 - rate), m = sigmoid((log(1 - rate) - log(rate) + l) / temperature), l ~ Logistic(0, 1): Gal et al. 2017.

    A mask of ordinary dropout is a comparison with `rate`, which has no derivative; this one is the same mask with soft
    edges, and has. key: another for each step, from the batch. x: floats. rate: in (0, 1), a number or an array that
    broadcasts against x; learn it as `hg.unit_interval(0.5)`. temperature: towards 0 the mask becomes ordinary dropout's and
    its derivative noisier, above 1/2 it is another noise than dropout's.
    """
    if isinstance(rate, (Domain, Knots, PerStep)):
        raise TypeError(
            f"hg.concrete_dropout: `rate` is {rate!r}, which is no number. A loss reads what hg.natural(hypers) gives, "
            "through `theta`: there it finds an hg.PerStep as its value of one step."
        )
    key = check_key(key)
    if not eqx.is_array_like(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise TypeError(f"hg.concrete_dropout: `x` must be an array of floats; got {describe(x)}.")
    for name, value, high in (("rate", rate, 1.0), ("temperature", temperature, np.inf)):
        if not isinstance(value, jax.core.Tracer) and not np.all((np.asarray(value) > 0) & (np.asarray(value) < high)):
            raise ValueError(
                f"hg.concrete_dropout: `{name}` must be {'in (0, 1)' if high == 1 else 'above 0'}; got {value!r}. "
                "Without dropout, leave it out: at its ends a rate has no derivative."
            )
    x = jnp.asarray(x)
    wide = np.promote_types(x.dtype, np.float32)  # of 16 bits, noise has too few levels for small rates
    rate = jnp.asarray(rate).astype(wide)
    shape = jnp.broadcast_shapes(x.shape, rate.shape)
    logit = jnp.log1p(-rate) - jnp.log(rate) + jax.random.logistic(key, shape, wide)
    return (x.astype(wide) * jax.nn.sigmoid(logit / temperature) / (1 - rate)).astype(x.dtype)
