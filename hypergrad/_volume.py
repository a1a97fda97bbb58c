"""One step of one leaf in floats, and what it makes of volumes.

Invariant: a step that has an explicit inverse multiplies volumes by the product of its decays, whatever the parameters are:
each link in its turn is scaled by its decay and shifted by what does not depend on it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from hypergrad.optimizers.chain import (
    GRADIENT,
    PARAMS,
    Link,
    Optimizer,
    View,
    check_fits,
    first_value,
    reads_gradient,
)
from hypergrad.optimizers.prepared import prepare


Values = dict[str, Array]  # of one leaf: link -> value


def at_half(rule: Optimizer, ndim: int) -> dict[str, Array]:
    """What increments read as h where all hyperparameters are 1/2, at a first step."""
    h = prepare(
        rule, {field: jnp.full((1,) * (1 + ndim), 0.5) for field in rule.hyperparameters()}, 1, jnp.result_type(float)
    )
    return {k: x.reshape(()) if x.size == 1 else x for k, x in h.items()}


def increment(link: Link, h: Any, z: Any, g: Array) -> Array:
    """What a link adds; also that of parameters that read the gradient."""
    if link.increment is None:
        return jnp.zeros(())
    args = (View(h, link.name), View(z, link.name))
    with_gradient = link.name != PARAMS or reads_gradient((link,))
    return link.increment(*args, g) if with_gradient else link.increment(*args)


def step(rule: Optimizer, h: Any, z: Values, g: Array) -> Values:
    """z_k <- rho_k z_k + increment_k."""
    z = dict(z)
    for link in rule.chain:
        others = {name: x for name, x in z.items() if name != link.name}
        kept = z[link.name] * h[link.decay] if link.decay else z[link.name]
        update = increment(link, h, others, g)
        check_fits(link, jnp.shape(update), kept.shape)
        z[link.name] = kept + update
    return z


def settled(rule: Optimizer, h: Any, gradients: list[Array]) -> Values:
    """What links have come to after some steps."""
    z = {link.name: first_value(link, jnp.zeros_like(gradients[0])) for link in rule.chain[:-1]} | {PARAMS: gradients[0]}
    for g in gradients:
        z = step(rule, h, z, g)
    return z


def of_either_sign(rule: Optimizer, h: Any, gradients: list[Array]) -> set[str]:
    """The links that training makes negative somewhere: a velocity, and no mean of squares."""
    ends = [settled(rule, h, [sign * g for g in gradients]) for sign in (1, -1)]
    return {name for end in ends for name, x in end.items() if bool(jnp.any(x < 0))}


def signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """As many of the one kind as of the other."""
    pair = rng.permuted([-1.0, 1.0])
    return rng.permuted(np.resize(pair, math.prod(shape))).reshape(shape)


def check_volume(rule: Optimizer, shape: tuple[int, ...]) -> None:
    """Assert that |det J| of a step is the product of the decays at two points, J its Jacobian in all links of a leaf."""
    if any(link.signal != GRADIENT for link in rule.chain):
        return  # the loss of the checker has no other signals
    rng = np.random.default_rng(0)
    h, draw = at_half(rule, len(shape)), lambda: jnp.asarray(rng.normal(size=shape))
    slope, shift = draw(), draw()
    gradient = jax.grad(lambda w: jnp.sum(jnp.logaddexp(slope * (w - shift), 0)) + jnp.tanh(jnp.vdot(slope, w)))
    start = settled(rule, h, [draw() for _ in range(8)])
    of_decays = sum(start[link.name].size * jnp.log(h[link.decay]) for link in rule.chain if link.decay)
    found = []
    for _ in range(2):
        flat, unravel = ravel_pytree({**start, PARAMS: draw()})
        one = lambda x, unravel=unravel: ravel_pytree(step(rule, h, z := unravel(x), gradient(z[PARAMS])))[0]  # noqa: E731
        found.append(float(jnp.linalg.slogdet(jax.jacobian(one)(flat))[1]))
    if not np.allclose(found, of_decays, rtol=1e-6, atol=1e-6):
        name = type(rule).__name__
        raise AssertionError(
            f"{name} has no explicit inverse: a step multiplies volumes by exp({found[0]:.4g}) at some parameters and by "
            f"exp({found[1]:.4g}) at others, where its decays make exp({float(of_decays):.4g}). Does the increment of "
            f"`params` read the gradient? hg.with_gradient_link({name}(...)) gives it an inverse."
        )
