"""RMSProp and Adagrad with momentum, in optax's conventions: the learning rate inside the momentum, eps inside the root."""

from typing import Any

import jax
from jax import Array

from hypergrad.optimizers.chain import Link, Optimizer, View


def _velocity(h: View, z: View, g: Array) -> Array:
    return -h.learning_rate * g * _inverse_root(z.square + h.eps)


@jax.custom_jvp
def _inverse_root(x: Array) -> Array:
    return jax.lax.rsqrt(x)


@_inverse_root.defjvp
def _inverse_root_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Factor by factor, as the cube of the root may overflow where a gradient of zero makes the whole zero."""
    root = _inverse_root(*primals)
    return root, -0.5 * (((tangents[0] * root) * root) * root)


_VELOCITY = Link("velocity", _velocity, decay="momentum")
_PARAMS = Link("params", lambda h, z: z.velocity)


class RMSProp(Optimizer):
    """s <- r s + (1 - r) g^2;  v <- m v - a g / sqrt(s + eps);  w <- w + v (Tieleman and Hinton 2012).

    learning_rate: a; decay: r; momentum: m, both in [2^-16, 1 - 2^-16], used as multiples of 2^-16; eps: inside the root,
    as `optax.rmsprop(a, decay, eps, momentum=m)`: gradients below sqrt(eps) are damped, and nothing divides by zero. Each a
    scalar, a `PerStep`, an array of a parameter's shape, or a pytree prefix of the parameters with such leaves. State:
    {"square", "velocity": like params}. Rounding adds up to noise of 6e-22 in s at r = 0.9 and of 1.5e-10 in v at m = 0.9.

    Without momentum it has no inverse: the step would read the gradient at the parameters that it leaves.
    """

    learning_rate: Any
    decay: Any = 0.9
    momentum: Any = 0.9
    eps: Any = 1e-8

    chain = (Link("square", lambda h, z, g: (1 - h.decay) * (g * g), decay="decay", wide=True), _VELOCITY, _PARAMS)
    entrywise = True


class Adagrad(Optimizer):
    """s <- s + g^2;  v <- m v - a g / sqrt(s + eps);  w <- w + v (Duchi, Hazan and Singer 2011), with momentum.

    learning_rate: a; momentum: m in [2^-16, 1 - 2^-16], used as a multiple of 2^-16; eps: inside the root. As optax's
    `scale_by_rss(0.0, eps)`, learning rate, `trace(m)`; to start the sum elsewhere (`optax.adagrad`: at 0.1), pass `state`
    to `hg.train`. Hyperparameters as for `RMSProp`. State: {"square", "velocity": like params}. The sum loses nothing and
    needs no buffer; it is rounded to 2^-86 (float32 parameters) and may grow to 2^22.

    Without momentum it has no inverse: the step would read the gradient at the parameters that it leaves.
    """

    learning_rate: Any
    momentum: Any = 0.9
    eps: Any = 1e-8

    chain = (Link("square", lambda h, z, g: g * g, wide=True), _VELOCITY, _PARAMS)
    entrywise = True
