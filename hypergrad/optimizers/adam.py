"""Adam and AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019), in optax's conventions."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.chain import Link, Optimizer, View
from hypergrad.optimizers.decoupled import decay_of, decaying


MEAN = Link("mean", lambda h, z, g: (1 - h.b1) * g, decay="b1")
SQUARE = Link("square", lambda h, z, g: (1 - h.b2) * (g * g), decay="b2", wide=True, bits_a_step=0.25)


def _step(h: View, z: View) -> Array:
    # No product enters the sum: its bits are the same whatever it is compiled with, so it needs no program of its own.
    return -(h.learning_rate * h.unbias_mean) * z.mean * _inverse(root_of(h, z) + h.eps)


def root_of(h: View, z: View) -> Array:
    """sqrt(s / c2), and no less than m allows."""
    return _larger(root(z.square * h.unbias_square), (h.least * h.unbias_root) * jnp.abs(z.mean))


class Adam(Optimizer):
    """m <- b1 m + (1 - b1) g;  s <- b2 s + (1 - b2) g^2;  w <- w - a (m / c1) / (sqrt(s / c2) + eps), c_k = 1 - prod b_k.

    learning_rate: a; b1, b2 in [2^-16, 1 - 2^-16], used as round(b 2^16) / 2^16, the products over the steps of this run
    and of those that `state` comes from; eps: outside of the root, as `optax.adam` with eps_root = 0. Each a scalar, a
    `PerStep`, an array of a parameter's shape, or a pytree prefix of the parameters with such leaves.
    State: {"mean", "square": like params; "mean_weight", "square_weight": c_1, c_2, like b1 and b2 without their steps}.
    Without the weights the products begin anew.

    Quanta (float32 parameters): increments of m are rounded to 2^-32 at worst, those of s to 2^-70, which adds up to a
    standard deviation of 1.5e-10 in m at b1 = 0.9 and of 5.5e-21 in s at b2 = 0.999 (about as much where weights have
    their own decays). So s is exact to 1e-6 where |g| is 1e-7 and to 1e-4 where it is 1e-8, once 1/(1 - b2) steps filled
    it; in the first steps it is smaller than g^2 by c_2, so that gradients of 1e-9 are noise there. What noise takes from s
    below what m allows, 0.998 of m^2 (1 - b1^2/b2) (1 - b2) / (1 - b1)^2, is put back, so that no step gets large by it. s
    is never negative, and may grow to 2^22. Where it is zero, its derivative is taken as zero.
    """

    learning_rate: Any
    b1: Any = 0.9
    b2: Any = 0.999
    eps: Any = 1e-8

    chain: ClassVar[tuple[Link, ...]] = (MEAN, SQUARE, Link("params", _step))
    weights = {"mean_weight": "b1", "square_weight": "b2"}
    bounds = {"least": (MEAN, SQUARE)}
    entrywise = True
    by_step = True

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        given = {key: value for key, value in h.items() if key not in self.weights}
        c1, c2 = (bias_correction(h[decay], h.get(name), steps) for name, decay in self.weights.items())
        unbias = {"unbias_mean": 1 / c1, "unbias_square": 1 / c2, "unbias_root": 1 / jnp.sqrt(c2)}
        return {**given, **unbias, "least": _least(h["b1"], h["b2"])}

    def begin(self, h: dict[str, Array], z: dict[str, Array]) -> dict[str, Array]:
        """Nothing is put back into an s that does not have the least already: it was not made from m by these decays."""
        mean, square = (jax.lax.stop_gradient(z[name])[None] for name in ("mean", "square"))
        return {**h, "least": jnp.where(jnp.sqrt(square) >= h["least"] * jnp.abs(mean), h["least"], 0)}


class AdamW(Adam):
    """`Adam` with decaying parameters, w <- (1 - a weight_decay) w - a (m / c1) / (sqrt(s / c2) + eps), as `optax.adamw`.

    1 - a weight_decay is a multiple of 2^-24 in (0, 1] at each step, and over many what it stands for: what rounding leaves
    is kept for the next. Only where each weight has a decay of its own it is rounded to the nearest at every step, so that a
    product of 1e-6 is met to within 3%, and one below 3e-8 is none.
    """

    weight_decay: Any = 1e-4

    chain: ClassVar[tuple[Link, ...]] = (MEAN, SQUARE, decaying(_step))
    entrywise = True
    by_step = True

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        return {**super().prepare(h, steps), **decay_of(h, steps)}


def root(x: Array) -> Array:
    """sqrt(x) whose derivative at zero is zero, not infinite; there it is the least root of a number, 2^-63 in float32."""
    return jnp.sqrt(jnp.where(x > 0, x, jnp.finfo(x.dtype).tiny))


@jax.custom_jvp
def _inverse(x: Array) -> Array:
    return 1 / x


@_inverse.defjvp
def _inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """By the inverse itself: that of a quotient divides again."""
    inverse = _inverse(*primals)
    return inverse, -(tangents[0] * inverse) * inverse


@jax.custom_jvp
def _larger(x: Array, y: Array) -> Array:
    return jax.lax.max(x, y)


@_larger.defjvp
def _larger_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """By one choice for both: the derivative of a maximum divides, to share where the two are equal."""
    first = primals[0] > primals[1]
    return jnp.where(first, *primals), jnp.where(first, *tangents)


@jax.jit
def _least(b1: Array, b2: Array) -> Array:
    """r with sqrt(s) > r |m| whatever the gradients were, by Cauchy and Schwarz; 0 where nothing bounds m. [1, ..]

    m_t^2 <= q_t s_t with q_t = (b1^2 / b2) q_(t-1) + (1 - b1)^2 / (1 - b2), the decays being those of step t, so q never
    exceeds the largest of the second summand over 1 - the largest of the first factor.
    """
    kept = jnp.max(b1**2 / b2, axis=0, keepdims=True)
    fresh = jnp.max((1 - b1) ** 2 / (1 - b2), axis=0, keepdims=True)
    # What it replaces is noise, which has no derivative. A thousandth lower, since gradients that grow by b2 / b1 a step,
    # and the first where b1^2 is next to nothing, attain it, and sqrt(s) has another derivative in the decays.
    return jax.lax.stop_gradient(0.999 * jnp.sqrt(jnp.maximum(1 - kept, 0) / fresh))


def bias_correction(b: Array, before: Array | None, steps: int) -> Array:
    """1 - the product of b over all steps so far, and of those before this run: [steps | 1, ..] -> [steps, ..]"""
    weight = _mean_weight(b, steps)
    return weight if before is None else before + (1 - before) * weight


@functools.partial(jax.jit, static_argnames="steps")
def _mean_weight(b: Array, steps: int) -> Array:
    """1 - b_1 ... b_t: by what a decaying mean that starts at zero falls short. [steps | 1, ..] -> [steps, ..]

    By logarithms: the difference of 1 and a product near 1 would lose the first digits of the first steps.
    """
    return -jnp.expm1(jnp.cumsum(jnp.log(jnp.broadcast_to(b, (steps, *b.shape[1:]))), axis=0))
