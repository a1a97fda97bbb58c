"""Nesterov's momentum, in optax's conventions, by a gradient link."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.adam import MEAN, SQUARE, AdamW, root_of
from hypergrad.optimizers.chain import Link, View
from hypergrad.optimizers.decoupled import decaying
from hypergrad.optimizers.gradient_link import GradientLinked


class Nesterov(GradientLinked):
    """v <- m v - g;  w <- w + a (m v - d)  with the new v and d <- 2^-k d + (1 - 2^-k) g in place of g (Nesterov 1983).

    learning_rate: a; momentum: m, as for `HeavyBall`; bits: k, from 1 to 16, an int. As `optax.sgd(a, m, nesterov=True)` but
    for d, without which the step has no inverse (`with_gradient_link`). k + log2(1/m) bits a parameter and step. State:
    {"gradient", "velocity": like params}.
    """

    learning_rate: Any
    momentum: Any = 0.9

    rule_chain = (
        Link("velocity", lambda h, z, g: -g, decay="momentum"),
        Link("params", lambda h, z, g: h.learning_rate * (h.momentum * z.velocity - g)),
    )
    linear = True
    entrywise = True
    by_step = True


def _step(h: View, z: View, g: Array) -> Array:
    ahead = (h.b1 * h.unbias_next) * z.mean + ((1 - h.b1) * h.unbias_mean) * g
    return -h.learning_rate * ahead / (root_of(h, z) + h.eps)


class NAdamW(GradientLinked, AdamW):  # type: ignore[override]
    """`AdamW` whose mean looks a step ahead: w <- (1 - a wd) w - a (b1 m / c1' + (1 - b1) d / c1) / (sqrt(s / c2) + eps).

    c1' is c1 of the next step (of the last step, as if b1 went on); d <- 2^-k d + (1 - 2^-k) g in place of g. As
    `optax.nadamw` but for d, without which the step has no inverse (Dozat 2016). Hyperparameters as for `AdamW`; bits: k,
    from 1 to 16, an int. State: {"gradient", "mean", "square": like params; "mean_weight", "square_weight"}.
    """

    entrywise = True
    rule_chain = (MEAN, SQUARE, decaying(_step))
    by_step = False

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        h = super().prepare(h, steps)
        c1 = 1 / h["unbias_mean"]
        b1 = jnp.broadcast_to(h["b1"], c1.shape)
        return {**h, "unbias_next": 1 / (c1 + (1 - c1) * (1 - jnp.concatenate([b1[1:], b1[-1:]])))}
