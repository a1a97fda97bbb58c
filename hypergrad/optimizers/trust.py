"""LARS and LAMB, whose steps are as long as the parameters that they move, leaf by leaf, in optax's conventions."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.adam import MEAN, SQUARE, bias_correction, root
from hypergrad.optimizers.chain import Link, Optimizer, View
from hypergrad.optimizers.gradient_link import BITS, check_bits


def _scaled(w: Array, step: Array, trust: Any) -> Array:
    """trust (|w| / |step|) step, or step itself where either norm is zero."""
    squares = jnp.sum(w * w), jnp.sum(step * step)
    some = (squares[0] > 0) & (squares[1] > 0)
    sizes = [jnp.sqrt(jnp.where(some, x, 1)) for x in squares]  # roots first: the derivative of a ratio has squares again
    return jnp.where(some, trust * (sizes[0] / sizes[1]), 1) * step


class LARS(Optimizer):
    """u = g + wd w;  v <- m v - a c (|w| / |u|) u;  w <- w + v, norms of each leaf (You, Gitman and Ginsburg 2017).

    learning_rate: a; momentum: m in [2^-16, 1 - 2^-16]; weight_decay: wd; trust: c. Where w or u is all zeros, v <- m v - a
    u. As `optax.lars`, its eps being 0. Each a scalar, a `PerStep`, an array of a parameter's shape, or a pytree prefix of
    the parameters with such leaves. log2(1/m) bits a parameter and step. State: {"velocity": like params}.
    """

    learning_rate: Any
    momentum: Any = 0.9
    weight_decay: Any = 0.0
    trust: Any = 1e-3

    chain = (
        Link(
            "velocity",
            lambda h, z, g: -h.learning_rate * _scaled(z.params, g + h.weight_decay * z.params, h.trust),
            decay="momentum",
        ),
        Link("params", lambda h, z: z.velocity),
    )


def _step(h: View, z: View, g: Array) -> Array:
    del g
    u = h.unbias_mean * z.mean / (root(z.square * h.unbias_square) + h.eps) + h.weight_decay * z.params
    return (h.left - 1) * h.learning_rate * _scaled(z.params, u, 1)


class LAMB(Optimizer):
    """m, s as for `Adam`;  u = (m / c1) / (sqrt(s / c2) + eps) + wd w;  d <- 2^-k d - (1 - 2^-k) a (|w|/|u|) u;  w <- w + d.

    As `optax.lamb` (You et al. 2020) but for d: |w| is the norm of the very parameters that move, which the step back would
    need before it has them. So 2^-k of a step comes one late, at k bits more than Adam's. learning_rate: a; weight_decay:
    wd; bits: k, from 1 to 16, an int. Hyperparameters as for `AdamW`. State: {"mean", "square", "step": like params; the
    weights of both means}.
    """

    learning_rate: Any
    b1: Any = 0.9
    b2: Any = 0.999
    eps: Any = 1e-6
    weight_decay: Any = 0.0
    bits: int = eqx.field(static=True, kw_only=True, default=BITS)

    weights = {"mean_weight": "b1", "square_weight": "b2"}
    by_step = True

    def __check_init__(self) -> None:
        check_bits(self)

    @property
    def chain(self) -> tuple[Link, ...]:  # type: ignore[override]
        return (MEAN, SQUARE, Link("step", _step, decay="left", bits_a_step=self.bits), _MOVE)

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        c1, c2 = (bias_correction(h[decay], h.get(name), steps) for name, decay in self.weights.items())
        given = {key: value for key, value in h.items() if key not in self.weights}
        left = jnp.full((1,), 2.0**-self.bits, h["learning_rate"].dtype)
        return {**given, "unbias_mean": 1 / c1, "unbias_square": 1 / c2, "left": left}


_MOVE = Link("params", lambda h, z: z.step)
