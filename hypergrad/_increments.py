"""What increments are held to at concrete values: that they are pure, have their derivatives, and are what their rule says.

Invariant: what passes here has the derivatives that differences give, in hyperparameters, links, weights and gradients, at
these hyperparameters and at others, and where gradients, links or weights are of any size in `SIZES`.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._volume import Values, increment, of_either_sign, points, settled, signs
from hypergrad.optimizers.chain import PARAMS, Link, Optimizer, first_value
from hypergrad.optimizers.partition import Layer
from hypergrad.optimizers.transform import Transform


SIZES = (1.0, 1e-2, 1e2)  # what cuts or bends may do so beyond a bound, or below it


def check_increments(rule: Optimizer, shape: tuple[int, ...]) -> None:
    """Each increment's derivative against differences, and that it is linear in the gradient where the rule says so."""
    rng = np.random.default_rng(0)
    gradients = [_either(rng, shape) for _ in range(8)]
    for k, h in enumerate(points(rule, gradients)):
        drawn = _Drawn(rng, h, settled(rule, h, gradients), of_either_sign(rule, h, gradients), shape)
        for link in rule.chain:
            _check_increment(rule, link, drawn, SIZES[: 1 if k else None])


class _Drawn(NamedTuple):
    """Arguments of increments, as many as are asked for."""

    rng: np.random.Generator
    h: dict[str, Array]
    trained: Values
    signed: set[str]
    shape: tuple[int, ...]

    def arguments(self, link: Link, sizes: Any = (1.0, 1.0, 1.0)) -> Any:
        """(h, z, g). Any values of links that are like the leaf; of others such as training makes. sizes: of the gradient,
        of links and of weights."""
        of_g, of_links, of_weights = sizes
        z = {k: self._value(k, of_weights if k == PARAMS else of_links) for k in self.trained if k != link.name}
        return self.h, z, of_g * _either(self.rng, self.shape)

    def direction(self, link: Link, sizes: Any) -> Any:
        """One for each argument, in parts of it."""
        _, z, g = self.arguments(link, sizes)
        return {k: x * self.rng.uniform(0.5, 1.5) * self.rng.choice([-1, 1]) for k, x in self.h.items()}, z, g

    def _value(self, link: str, size: float) -> Array:
        if (x := self.trained[link]).shape != self.shape:
            return x * self.rng.uniform(0.9, 1.1)
        return size * (_either if link in self.signed else _above_zero)(self.rng, self.shape)


def _check_increment(rule: Optimizer, link: Link, drawn: _Drawn, each: Sequence[float]) -> None:
    """each: the sizes of gradients, links and weights."""
    name = type(rule).__name__
    f = lambda x: increment(link, *x)  # noqa: E731
    at = drawn.arguments(link)
    if not np.array_equal(f(at), f(at), equal_nan=True):
        raise AssertionError(
            f"{name}: the increment of link `{link.name}` gives two values for the same arguments. It must be a pure "
            "function of h, z and g, or a step cannot be undone."
        )

    one, derivative = jax.jit(f), jax.jit(lambda x, along: jax.jvp(f, (x,), (along,))[1])

    def agrees(sizes: Any) -> bool:
        x, along = drawn.arguments(link, sizes), drawn.direction(link, sizes)
        ahead, behind = (one(jax.tree.map(lambda x, d, e=e: x + e * d, x, along)) for e in (1e-5, -1e-5))
        tangent, found = derivative(x, along), (ahead - behind) / 2e-5
        if {*sizes} != {1.0} and not bool(jnp.isfinite(found).all()):
            return True  # an exponential of 100
        return bool(jnp.allclose(found, tangent, rtol=1e-5, atol=1e-7 + 1e-6 * jnp.max(jnp.abs(tangent), initial=0)))

    for sizes in dict.fromkeys(x for s in each for x in ((s, 1.0, 1.0), (1.0, s, 1.0), (1.0, 1.0, s))):
        if not any(agrees(sizes) for _ in range(3)):  # a difference may lie across a jump, of a sign or a rounding
            raise AssertionError(
                f"{name}: the derivative of the increment of link `{link.name}` is not what differences give. Does it "
                "have a derivative rule of its own, or round?"
            )
    far = (*drawn.arguments(link)[:2], SIZES[-1] * at[2])
    first, second = (jax.vjp(f, x)[1](jnp.ones_like(f(at)))[0][2] for x in (at, far))
    if rule.linear and not bool(jnp.allclose(first, second, rtol=1e-12)):
        raise AssertionError(
            f"{name} declares linear = True, but the gradient enters the increment of link `{link.name}` not linearly, "
            "or with a factor that reads another link. Its derivative would be wrong: leave `linear` out."
        )


def check_entrywise(rule: Layer, around: list[Layer]) -> None:
    """Increments, first values and transformations of a leaf, against those of the same entries in two leaves, where these
    declare that they work entry by entry."""
    optimizer, rng = rule.optimizer, np.random.default_rng(0)
    either = lambda: _either(rng, (4, 4))  # noqa: E731
    parts = lambda x: [x.ravel()[:5], x.ravel()[5:]]  # noqa: E731

    def agree(owner: Optimizer, what: str, one: Array, two: Sequence[Array]) -> None:
        if one.size != 16 or not bool(jnp.allclose(one.ravel(), jnp.concatenate(two), rtol=1e-12)):
            raise AssertionError(
                f"{type(owner).__name__} declares that it works entry by entry, but {what} depends on what else is in the "
                "leaf, or on its shape: a norm, a mean over an axis? Small leaves are laid side by side then, and it would "
                "see several as one. Leave `entrywise` (of a transformation: `entrywise_transform`) out."
            )

    if not optimizer.entrywise or not all(layer.optimizer.entrywise_transform for layer in around):  # type: ignore[attr-defined]
        return
    gradients = [either().ravel() for _ in range(8)]
    for link, h in itertools.product(optimizer.chain, points(optimizer, gradients)):
        signed = of_either_sign(optimizer, h, gradients)
        z = {k.name: (_either if k.name in signed else _above_zero)(rng, (4, 4)) for k in optimizer.chain if k is not link}
        for g in (size * either() for size in SIZES):
            halves = [increment(link, h, {k: parts(x)[i] for k, x in z.items()}, parts(g)[i]) for i in (0, 1)]
            agree(optimizer, f"the increment of link `{link.name}`", increment(link, h, z, g), halves)
        first = lambda x, link=link: first_value(link, x)  # noqa: E731
        agree(optimizer, f"the first value of link `{link.name}`", first(g), [first(x) for x in parts(g)])
    for layer in around:
        keys = tuple((field, field) for field in layer.optimizer.hyperparameters())
        one, two = (Transform("", type(layer.optimizer).transform, keys, b) for b in ((0,), (0, 1)))  # type: ignore[attr-defined]
        rates, w, g = {field: jnp.asarray(0.5) for field, _ in keys}, either(), either()
        agree(
            layer.optimizer,
            "what it makes of a gradient",
            one([rates], [w], [g])[0],
            two([rates, rates], parts(w), parts(g)),
        )


def _above_zero(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return jnp.asarray(rng.uniform(0.5, 1.5, shape))


def _either(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Of either sign."""
    return _above_zero(rng, shape) * signs(rng, shape)
