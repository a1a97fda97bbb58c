"""Sophia, whose steps are the mean gradient over a mean diagonal of curvature, clipped entry by entry."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.chain import Link, Optimizer, View
from hypergrad.optimizers.decoupled import decay_of, decaying
from hypergrad.optimizers.diagonal import SAMPLED, sampled


_HUTCHINSON = "hessian_diagonal"  # signal


def _hutchinson(loss: Callable[..., Any], params: Any, theta: Any, batch: Any, key: Array) -> Any:
    """u * (H u) for signs u. Reverse over reverse: a loss with a `jax.custom_vjp` has no other product."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    signs = [jax.random.rademacher(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]

    def slope(params: Any) -> Array:
        gradient = jax.tree.leaves(jax.grad(loss)(params, theta, batch))
        return sum((jnp.vdot(u, g) for u, g in zip(signs, gradient, strict=True)), jnp.zeros(()))

    return jax.tree.map(lambda u, product: u * product, jax.tree.unflatten(tree, signs), jax.grad(slope)(params))


def _step(h: View, z: View) -> Array:
    return -h.learning_rate * jnp.clip(z.mean / jnp.maximum(h.gamma * z.curvature, h.eps), -1, 1)


def _chain(signal: str) -> tuple[Link, ...]:
    return (
        Link("mean", lambda h, z, g: (1 - h.b1) * g, decay="b1"),
        Link("curvature", lambda h, z, g: (1 - h.b2) * g, decay="b2", wide=True, signal=signal),
        decaying(_step),
    )


class Sophia(Optimizer):
    """m <- b1 m + (1 - b1) g;  c <- b2 c + (1 - b2) e;  w <- (1 - a wd) w - a clip(m / max(gamma c, eps), -1, 1).

    e = u * (H u): an unbiased estimate of the diagonal of the loss's Hessian at the old parameters, for signs u drawn by the
    step's own key (Hutchinson). learning_rate: a, the most that an entry moves in a step; b1, b2 in [2^-16, 1 - 2^-16], used
    as multiples of 2^-16; gamma: how much of m / c is not clipped; eps; weight_decay: wd. Each a scalar, a `PerStep`, an
    array of a parameter's shape, or a pytree prefix of the parameters with such leaves. An entry that is clipped tells the
    hypergradient its sign alone. State: {"mean", "curvature": like params}. log2(1/b1) + log2(1/b2) bits per parameter and
    step.

    The authors estimate at every tenth step, and hold c between; here it is every step, by two more gradients: b2 = 0.999 is
    their 0.99 at every tenth. Source: Liu, Li, Hall, Liang and Ma (2023); `optax.contrib.sophia` takes the c of the step
    before, corrects m for its start, and has other defaults (b1, eps, weight_decay).
    """

    learning_rate: Any
    b1: Any = 0.96
    b2: Any = 0.999
    gamma: Any = 0.01
    eps: Any = 1e-12
    weight_decay: Any = 0.0

    entrywise = True
    by_step = True
    signals = {_HUTCHINSON: _hutchinson}
    chain = _chain(_HUTCHINSON)

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        return {**h, **decay_of(h, steps)}


class SophiaG(Sophia):
    """`Sophia` with the diagonal of the Gauss-Newton matrix, for labels that the model draws by the step's own key.

    The Gauss-Newton-Bartlett estimator, never negative, whose gamma the authors give as 0.05. The loss must end in a
    likelihood that is known: one of optax's cross entropies or squared errors, `jax.nn.log_softmax`, or
    `hg.curvature.likelihood`. Hyperparameters and state as for `Sophia`.
    """

    gamma: Any = 0.05

    signals = {SAMPLED: sampled}
    of_examples = True
    chain = _chain(SAMPLED)
    entrywise = True
