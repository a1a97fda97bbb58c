"""What increments are held to at concrete values: that they are pure, have their derivatives, and are what their rule says.

Invariant: what passes here has the derivatives that differences give, at gradients of every size in `SIZES`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._volume import at_half, increment, of_either_sign, settled, signs
from hypergrad.optimizers.chain import Link, Optimizer, first_value
from hypergrad.optimizers.partition import Layer
from hypergrad.optimizers.transform import Transform


SIZES = (1.0, 1e-2, 1e2)  # of gradients: what cuts or bends may do so beyond a bound, or below it


def check_increments(rule: Optimizer, shape: tuple[int, ...]) -> None:
    """Each increment's derivative against differences, and that it is linear in the gradient where the rule says so."""
    name = type(rule).__name__
    rng = np.random.default_rng(0)
    draw = lambda: jnp.asarray(rng.uniform(0.5, 1.5, shape))  # noqa: E731
    gradient = lambda: draw() * signs(rng, shape)  # noqa: E731 (of either sign)
    h = at_half(rule, len(shape))
    gradients = [gradient() for _ in range(8)]
    trained, signed = settled(rule, h, gradients), of_either_sign(rule, h, gradients)
    for link in rule.chain:

        def inputs(link: Link = link) -> Any:
            """Any values of links that are like the leaf; of others such as training makes."""
            like = lambda k: gradient() if k in signed else draw()  # noqa: E731
            drawn = {k: like(k) if x.shape == shape else x * rng.uniform(0.9, 1.1) for k, x in trained.items()}
            return h, {k: x for k, x in drawn.items() if k != link.name}, gradient()

        f = lambda x, link=link: increment(link, *x)  # noqa: E731
        at = inputs()
        if not np.array_equal(f(at), f(at), equal_nan=True):
            raise AssertionError(
                f"{name}: the increment of link `{link.name}` gives two values for the same arguments. It must be a pure "
                "function of h, z and g, or a step cannot be undone."
            )
        for size in SIZES:
            x, along = (*at[:2], size * at[2]), inputs()
            along = (*along[:2], size * along[2])
            ahead, behind = (f(jax.tree.map(lambda x, d, e=e: x + e * d, x, along)) for e in (1e-5, -1e-5))
            tangent = jax.jvp(f, (x,), (along,))[1]
            if not bool(jnp.allclose((ahead - behind) / 2e-5, tangent, rtol=1e-5, atol=1e-7)):
                raise AssertionError(
                    f"{name}: the derivative of the increment of link `{link.name}` is not what differences give. Does it "
                    "have a derivative rule of its own, or round?"
                )
        far = (*inputs()[:2], SIZES[-1] * gradient())
        first, second = (jax.vjp(f, x)[1](jnp.ones_like(tangent))[0][2] for x in (at, far))
        if rule.linear and not bool(jnp.allclose(first, second, rtol=1e-12)):
            raise AssertionError(
                f"{name} declares linear = True, but the gradient enters the increment of link `{link.name}` not linearly, "
                "or with a factor that reads another link. Its derivative would be wrong: leave `linear` out."
            )


def check_entrywise(rule: Layer, around: list[Layer]) -> None:
    """Increments, first values and transformations of a leaf, against those of the same entries in two leaves, where these
    declare that they work entry by entry."""
    optimizer, rng = rule.optimizer, np.random.default_rng(0)
    whole = lambda: jnp.asarray(rng.uniform(0.5, 1.5, (4, 4)))  # noqa: E731
    either = lambda: whole() * signs(rng, (4, 4))  # noqa: E731
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
    h = at_half(optimizer, 1)
    signed = of_either_sign(optimizer, h, [either() for _ in range(8)])
    for link in optimizer.chain:
        z = {k.name: either() if k.name in signed else whole() for k in optimizer.chain if k is not link}
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
