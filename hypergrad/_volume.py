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


def points(rule: Optimizer, gradients: list[Array]) -> list[dict[str, Array]]:
    """What increments read as h at a first step: where each hyperparameter is a number near 1/2, so that a small rate hides
    nothing, if that makes numbers of these gradients; and where they are as they were given, of several values the largest.
    """
    rng = np.random.default_rng(0)

    def at(values: dict[str, float]) -> dict[str, Array]:
        full = {field: jnp.full((1,) * (1 + gradients[0].ndim), x) for field, x in values.items()}
        h = prepare(rule, full, 1, jnp.result_type(float))
        return {k: x.reshape(()) if x.size == 1 else x for k, x in h.items()}

    given = at({field: _largest(value) for field, value in rule.hyperparameters().items()})
    if bad := [name for name, x in settled(rule, given, gradients).items() if not bool(jnp.isfinite(x).all())]:
        raise AssertionError(
            f"{type(rule).__name__}: link `{bad[0]}` becomes NaN or infinite with these hyperparameters, on gradients of "
            "size 1. Is there a sqrt or a logarithm below zero, or a quotient at zero?"
        )
    near_half = at({field: rng.uniform(0.35, 0.65) for field in rule.hyperparameters()})
    sound = all(bool(jnp.isfinite(x).all()) for x in settled(rule, near_half, gradients).values())
    return [near_half, given] if sound else [given]


def _largest(value: Any) -> float:
    entries = np.concatenate([np.ravel(x) for x in jax.tree.leaves(value)] or [np.full(1, 0.5)])
    return float(entries[np.argmax(np.abs(entries))]) if entries.size else 0.5


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
    gradients = [jnp.asarray(rng.normal(size=shape)) for _ in range(8)]
    for h in points(rule, gradients):
        _check_volume_at(rule, h, gradients, rng)


def _check_volume_at(rule: Optimizer, h: Any, gradients: list[Array], rng: np.random.Generator) -> None:
    draw = lambda: jnp.asarray(rng.normal(size=gradients[0].shape))  # noqa: E731
    slope, shift = draw(), draw()
    gradient = jax.grad(lambda w: jnp.sum(jnp.logaddexp(slope * (w - shift), 0)) + jnp.tanh(jnp.vdot(slope, w)))
    start = settled(rule, h, gradients)
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
