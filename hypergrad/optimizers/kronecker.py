"""K-FAC and its kin, whose steps are divided by Kronecker factors of curvature."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.curvature._axes import factors_by_axis
from hypergrad.optimizers.adam import bias_correction
from hypergrad.optimizers.chain import Link, Optimizer, Signal, View
from hypergrad.optimizers.choices import check_choice, check_int, check_of_leaves, known_zero
from hypergrad.optimizers.held import held_link, schedule
from hypergrad.optimizers.roots import inverse_power
from hypergrad.optimizers.tiles import Group, Tiles


OF_LEAVES = ("damping", "decay", "l2")


class KFAC(Optimizer):
    """A <- r A + (1 - r) A';  B <- r B + (1 - r) B';  v <- m v - (1 - m) (A + pi s)^-1 (g + l2 w) (B + s / pi)^-1;
    w <- w + a v.

    A', B': the Kronecker factors of the batch at the old parameters, of its inputs and of derivatives in its outputs by one
    label that the model draws an example (`hg.curvature.quantities`, "kfac"); s = sqrt(damping + l2), pi^2 the mean of the
    diagonal of A over that of B. A bias has B alone, and (B + s^2)^-1. The loss must be a mean over examples that ends in a
    likelihood that is known (optax's cross entropies and squared errors, `hg.curvature.likelihood`).

    learning_rate: a; momentum: m, in [2^-16, 1 - 2^-16]: each a scalar, a `PerStep`, an array of a parameter's shape, or a
    pytree prefix of the parameters with such leaves. decay: r, likewise in [2^-16, 1 - 2^-16], of the averages, which are
    divided by 1 - r^t; damping; l2: one value a leaf, or one per step. every: k, inverses are computed at steps 0, k, 2k, ..
    and held between, set anew but for 2^-16 of what they were. outputs: which axis of kernels of more than two axes is the
    outputs', "last" (flax) or "first" (equinox). What is used in no layer, such as a convolution in groups, has no factors:
    give it another rule by `hg.partition`.

    State: {"factors": a vector for each leaf, upper triangles; "inverses", of the same form, if k > 1, of (A / pi + s)^-1
    and (pi B + s)^-1; "velocity": like params; "factors_weight": 1 - r^t}.
    Source: Equation 4 of BackPACK (Dangel, Kunstner and Hennig 2020), which has neither averages nor momentum: decay and
    momentum of 2^-16 are that rule to 1.5e-5. Averages, momentum and held inverses as in Martens and Grosse (2015), whose
    rejected steps, and dampings that follow the reduction ratio, have no inverse.
    """

    learning_rate: Any
    damping: Any = 1e-2
    momentum: Any = 0.9
    decay: Any = 0.95
    l2: Any = 0.0
    every: int = eqx.field(static=True, kw_only=True, default=1)
    outputs: str = eqx.field(static=True, kw_only=True, default="last")

    quantity: ClassVar[str] = "kfac"
    weights = {"factors_weight": "decay"}
    of_examples = True

    def __check_init__(self) -> None:
        check_int(self, "every", 1)
        check_choice(self, "outputs", ("last", "first"))
        if known_zero(self.damping) and known_zero(self.l2):
            raise ValueError(
                f"hg.{type(self).__name__}: nothing is added to the factors where `damping` and `l2` are zero, and those of "
                "a batch with fewer examples than a layer has inputs have no inverse. Take a positive `damping`."
            )

    @property
    def form(self) -> "Form":
        return Form(self.quantity, self.every, self.outputs == "first")

    @property
    def chain(self) -> tuple[Link, ...]:  # type: ignore[override]
        return _chain(self.form)

    @property
    def signals(self) -> dict[str, Signal]:  # type: ignore[override]
        return {self.form.signal: _signal(self.form)}

    @property
    def by_step(self) -> bool:  # type: ignore[override]
        return self.every == 1

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        check_of_leaves(self, h, OF_LEAVES)
        new = {name: x for name, x in h.items() if name not in self.weights}
        new["unbias"] = 1 / bias_correction(h["decay"], h.get("factors_weight"), steps)
        return new | schedule(h, self.every, steps) if self.every > 1 else new


class KFLR(KFAC):
    """`KFAC` with B of the exact Hessian in the outputs: as many backward passes as there are outputs, and any loss."""

    quantity = "kflr"


class KFRA(KFAC):
    """`KFAC` with averages of the Hessian that are passed from layer to layer: for dense layers in sequence, and any loss.

    Source: Botev, Ritter and Barber (2017).
    """

    quantity = "kfra"


class Form(NamedTuple):
    """What of the rule is fixed; hashable."""

    quantity: str
    every: int
    outputs_first: bool

    @property
    def read(self) -> str:
        """The link that preconditions."""
        return "inverses" if self.every > 1 else "factors"

    @property
    def signal(self) -> str:
        return f"{self.quantity}, outputs {'first' if self.outputs_first else 'last'}"

    def merged(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A matrix of inputs and outputs, in whichever order; a vector of what has one axis or none."""
        if len(shape) < 2:
            return (_product(shape),)
        return (shape[0], _product(shape[1:])) if self.outputs_first else (_product(shape[:-1]), shape[-1])

    def tiles(self, shape: tuple[int, ...]) -> Tiles:
        merged = self.merged(shape)
        return Tiles(shape, merged, (Group(merged, ((0,) * len(merged),), (True,) * len(merged)),))

    def start(self, leaf: Array) -> Array:
        return jnp.zeros_like(self.tiles(leaf.shape).identity(leaf.dtype))

    def inverses(self, h: View, factors: Array, own: Tiles) -> Array:
        """The vector of pi (A + pi s)^-1 = (A / pi + s)^-1 and (B + s / pi)^-1 / pi = (pi B + s)^-1, neither above 1 / s; of
        (B + s^2)^-1 where there is no A."""
        (blocks,) = own.unpack(factors * h.unbias)
        s = h.damping + h.l2
        if len(blocks) == 1:
            return own.pack([[inverse_power(blocks[0], 1.0, s.reshape(1))]], factors.dtype)
        tiny = jnp.finfo(factors.dtype).tiny ** 0.5
        a, b = (jnp.trace(x, axis1=-2, axis2=-1) / x.shape[-1] for x in blocks)
        pi, root = jnp.sqrt((a + tiny) / (b + tiny))[:, None, None], jnp.sqrt(s).reshape(1)
        inverses = [inverse_power(x, 1.0, root) for x in (blocks[0] / pi, pi * blocks[1])]
        for i, absent in enumerate((a, b)):
            if blocks[i].shape[-1] == 1:  # no factor of a bias that has an axis of one
                alone = absent[:, None, None] == 0
                inverses[i] = jnp.where(alone, 1.0, inverses[i])
                inverses[1 - i] = jnp.where(alone, inverse_power(blocks[1 - i], 1.0, s.reshape(1)), inverses[1 - i])
        return own.pack([inverses], factors.dtype)

    def divided(self, h: View, z: View, g: Array) -> Array:
        """(A + pi s)^-1 g (B + s / pi)^-1"""
        own = self.tiles(g.shape)
        return own.times(z.inverses if self.every > 1 else self.inverses(h, z.factors, own), g)

    def velocity(self, h: View, z: View, g: Array) -> Array:
        return (h.momentum - 1) * self.divided(h, z, g + h.l2 * z.params)


def _product(shape: tuple[int, ...]) -> int:
    return functools.reduce(int.__mul__, shape, 1)


@functools.cache
def _signal(form: Form) -> Signal:
    def factors(loss: Callable[..., Any], params: Any, theta: Any, batch: Any, key: Array) -> Any:
        drawn = key if form.quantity == "kfac" else None
        found = factors_by_axis(loss, params, theta, batch, form.quantity, form.merged, drawn)

        def packed(leaf: Array, axes: list[Array]) -> Array:
            return form.tiles(leaf.shape).pack([[x[None] for x in axes]], leaf.dtype) if axes else jnp.zeros(0, leaf.dtype)

        return jax.tree.map(packed, params, found)

    return factors


@functools.cache
def _chain(form: Form) -> tuple[Link, ...]:
    factors = lambda h, z, g: (1 - h.decay) * g  # noqa: E731
    links = [Link("factors", factors, decay="decay", start=form.start, wide=True, signal=form.signal)]
    if form.every > 1:
        inverses = lambda h, z, g: form.inverses(h, z.factors, form.tiles(g.shape))  # noqa: E731
        links.append(held_link("inverses", inverses, form.every, form.start, wide=True))
    links.append(Link("velocity", form.velocity, decay="momentum"))
    return (*links, Link("params", lambda h, z: h.learning_rate * z.velocity))
