"""Rules and transformations as users write them, for random cases: some round or bend what passes through them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments import _bent_rules as bent
from hypergrad.optimizers import Link, Optimizer, Transformed


def _narrow(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(x.dtype)


def _linear(through: Callable[[jax.Array], jax.Array]) -> Any:
    """v <- m v + (1 - m) through(g);  w <- w - a v, which claims to be linear."""

    class Own(Optimizer):
        learning_rate: Any
        momentum: Any
        linear = True
        entrywise = True
        chain = (
            Link("velocity", lambda h, z, g: (1 - h.momentum) * through(g), decay="momentum"),
            Link("params", lambda h, z: -h.learning_rate * z.velocity),
        )

    return Own


class _Normed(Optimizer):
    """v <- m v - g / |g| by leaf;  w <- w + a sin(v)."""

    learning_rate: Any
    momentum: Any
    chain = (
        Link("velocity", lambda h, z, g: -g * jax.lax.rsqrt(jnp.sum(g * g) + 1e-2), decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * jnp.sin(z.velocity)),
    )


class _Deep(Optimizer):
    """s <- b s + (1 - b) g^2;  v <- m v - tanh(g) / sqrt(s + c);  w <- w + a v / (1 + s)."""

    learning_rate: Any
    momentum: Any
    b2: Any
    chain = (
        Link("square", lambda h, z, g: (1 - h.b2) * g * g, decay="b2", wide=True),
        Link("velocity", lambda h, z, g: -jnp.tanh(g) * jax.lax.rsqrt(z.square + 1e-2), decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * z.velocity / (1 + z.square)),
    )


def _ahead(loss: Any, params: Any, theta: Any, batch: Any, key: Any) -> Any:
    """The gradient somewhat further down (Foret et al. 2021, with the sign turned)."""
    step = lambda w, g: w - 0.05 * jnp.tanh(g)  # noqa: E731
    return jax.grad(loss)(jax.tree.map(step, params, jax.grad(loss)(params, theta, batch)), theta, batch)


def _noise(loss: Any, params: Any, theta: Any, batch: Any, key: Any) -> Any:
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree, [jax.random.normal(k, x.shape, x.dtype) * jnp.cos(x) for k, x in zip(keys, leaves, strict=True)]
    )


class _Signalled(Optimizer):
    """v <- m v - (g + s) / 2, s a gradient ahead;  n <- b n + (1 - b) noise;  w <- w + a (v + 0.1 n)."""

    learning_rate: Any
    momentum: Any
    b2: Any
    signals = {"ahead": _ahead, "noise": _noise}
    chain = (
        Link("noise", lambda h, z, g: (1 - h.b2) * g, decay="b2", signal="noise"),
        Link("ahead", lambda h, z, g: (1 - h.momentum) * g, decay="momentum", signal="ahead"),
        Link("velocity", lambda h, z, g: -(g + z.ahead) / 2, decay="momentum"),
        Link("params", lambda h, z: h.learning_rate * (z.velocity + 0.1 * z.noise)),
    )


OWN: dict[str, tuple[Any, float, tuple[str, ...]]] = {  # the rule, a rate that suits, its decays, and its marks
    "an own rule, normed": (_Normed, 0.05, ("momentum",)),
    "an own rule, deep": (_Deep, 0.02, ("momentum", "b2")),
    "an own rule, of signals": (_Signalled, 0.05, ("momentum", "b2")),
    "an own linear rule": (_linear(lambda g: 0.5 * g), 0.3, ("momentum",)),
    "an own linear rule, scaled": (_linear(lambda g: bent.scaled(g, 0.4)), 0.3, ("momentum",)),
    "an own linear rule, limited": (_linear(lambda g: bent.limited(g, 0.7)), 0.3, ("momentum",)),
    "an own linear rule, rounded": (_linear(_narrow), 0.3, ("momentum",)),
}  # fmt: skip
ROUND = ("an own linear rule, rounded",)  # those through 16 bits


class _Own(Transformed):
    size: Any
    entrywise_transform = True


class _Squashed(_Own):
    """g <- c tanh(g / c)."""

    @staticmethod
    def transform(h: Any, w: Any, g: Any) -> Any:
        return [hj.size * jnp.tanh(x / hj.size) for hj, x in zip(h, g, strict=True)]


class _Bent(_Own):
    """g <- (1 + c) g, whose cotangent is turned."""

    linear_transform = True

    @staticmethod
    def transform(h: Any, w: Any, g: Any) -> Any:
        return [(1 + hj.size) * bent.scaled(x, -0.6) for hj, x in zip(h, g, strict=True)]


class _Centred(Transformed):
    """g <- g - c mean(g) + c w, over all leaves."""

    size: Any
    linear_transform = True

    @staticmethod
    def transform(h: Any, w: Any, g: Any) -> Any:
        mean = sum(jnp.sum(x) for x in g) / max(sum(x.size for x in g), 1)
        return [x - hj.size * mean.astype(x.dtype) + hj.size * y for hj, y, x in zip(h, w, g, strict=True)]


OWN_TRANSFORMS: dict[str, tuple[Any, float]] = {
    "squashed": (_Squashed, 0.3), "bent": (_Bent, 0.2), "centred": (_Centred, 0.1),
}  # fmt: skip
