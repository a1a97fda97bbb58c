"""ADOPT, Adam that divides by what the gradients were before, in optax's conventions."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from hypergrad._placement import at_hand
from hypergrad.errors import RangeError, decay_sentence
from hypergrad.optimizers.adam import SQUARE, root
from hypergrad.optimizers.chain import Link, Optimizer, View
from hypergrad.optimizers.decoupled import decay_of, decaying


_ROUNDS_TO_ONE = 1 - 2.0**-17


def _mean(h: View, z: View, g: Array) -> Array:
    scaled = g / jnp.maximum(root(z.square), h.eps)  # the old square: its link comes after
    return (1 - h.b1) * jnp.clip(scaled, -h.largest, h.largest)


class ADOPT(Optimizer):
    """m <- b1 m + (1 - b1) clip(g / max(sqrt(s), eps), t^(1/4));  s <- b2 s + (1 - b2) g^2;  w <- (1 - a wd) w - a m.

    s is that of the steps before, and t = 0, 1, ..; the first step makes s = g^2, beside 2^-16 of what it had, and moves
    nothing by gradients: m keeps what it had. As `optax.contrib.adopt`, with its authors' decoupled decay (Taniguchi et al.
    2024). learning_rate: a;
    weight_decay: wd; b1 and b2 in [2^-16, 1 - 2^-16], used as multiples of 2^-16 (0.9999 as 0.99989). Each a scalar, a
    `PerStep`, an array of a parameter's shape, or a pytree prefix of the parameters with such leaves. State: {"mean",
    "square": like params}; a run that goes on from one has no first step, and t = 1, 2, ..
    """

    learning_rate: Any
    b1: Any = 0.9
    b2: Any = 0.9999
    eps: Any = 1e-6
    weight_decay: Any = 0.0

    chain = (
        Link("mean", _mean, decay="b1", may_be_one=True),
        SQUARE._replace(increment=lambda h, z, g: h.fresh * (g * g)),
        decaying(lambda h, z: -h.learning_rate * z.mean),
    )
    entrywise = True

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        if at_hand(h["b1"]) and (largest := float(jnp.max(h["b1"], initial=0))) >= _ROUNDS_TO_ONE:
            raise RangeError(decay_sentence("hg.ADOPT: `b1`", largest))
        h = h | {"b1": jnp.where(h["b1"] >= _ROUNDS_TO_ONE, jnp.nan, h["b1"])}  # it is 1 at the first step alone
        t = jnp.arange(steps, dtype=h["b1"].dtype).reshape(steps, *[1] * (h["b1"].ndim - 1))
        first = {"b1": jnp.where(t == 0, 1, h["b1"]), "b2": jnp.where(t == 0, 2.0**-16, h["b2"])}
        first["fresh"] = jnp.where(t == 0, 1, 1 - h["b2"])
        later = {"later b1": h["b1"], "later b2": h["b2"], "later largest": jnp.sqrt(jnp.sqrt(t + 1))}
        return {**h, **first, **later, **decay_of(h, steps), "largest": jnp.sqrt(jnp.sqrt(t))}

    def begin(self, h: dict[str, Array], z: dict[str, Array]) -> dict[str, Array]:
        del z
        return {**h, "b1": h["later b1"], "b2": h["later b2"], "fresh": 1 - h["later b2"], "largest": h["later largest"]}
