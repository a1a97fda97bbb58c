"""Rules whose parameters move by the gradient at the parameters that they leave, made reversible by one more link.

Invariant: the parameters read the link d <- 2^-k d + (1 - 2^-k) g in place of g, so that undoing their step needs no
gradient.

Without it the step has no explicit inverse, whatever the coordinates: the determinant of its Jacobian depends on the loss
(for Nesterov's momentum m (1 - a lambda) for each eigenvalue lambda of the Hessian), and that of a chain is the product of
its decays.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from hypergrad.hypers import describe
from hypergrad.optimizers.chain import GRADIENT, Link, Optimizer, Signal, View, reads_gradient


BITS = 4
_FORGOTTEN = "2^-bits"  # the decay of the link, as `h` calls it


class GradientLinked(Optimizer):
    """Base of rules with a gradient link. `rule_chain`: their links, whose last takes (h, z, g) and is given d as g.

    d <- 2^-k d + (1 - 2^-k) g, with k = `bits`: z.gradient of the new values, which other increments may read, too. It costs
    k bits a parameter and step, and d differs from g by 2^-k of what it was before.
    """

    rule_chain: ClassVar[tuple[Link, ...]]
    bits: int = eqx.field(static=True, kw_only=True, default=BITS)

    def __check_init__(self) -> None:
        check_bits(self)

    @property
    def chain(self) -> tuple[Link, ...]:  # type: ignore[override]
        return linked(self.rule_chain, self.bits)

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        return {**super().prepare(h, steps), **forgotten(h, self.bits)}


class WithGradientLink(GradientLinked):
    """A rule with a gradient link. Made by `with_gradient_link`."""

    rule: Optimizer

    def hyperparameters(self) -> dict[str, Any]:
        return self.rule.hyperparameters()

    @property
    def rule_chain(self) -> tuple[Link, ...]:  # type: ignore[override]
        return self.rule.chain

    @property
    def weights(self) -> Mapping[str, str]:  # type: ignore[override]
        return self.rule.weights

    @property
    def bounds(self) -> Mapping[str, tuple[Link, ...]]:  # type: ignore[override]
        return self.rule.bounds

    @property
    def signals(self) -> Mapping[str, Signal]:  # type: ignore[override]
        return self.rule.signals

    @property
    def of_examples(self) -> bool:  # type: ignore[override]
        return self.rule.of_examples

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.rule.linear

    @property
    def entrywise(self) -> bool:  # type: ignore[override]
        return self.rule.entrywise

    @property
    def approximate(self) -> str:  # type: ignore[override]
        return self.rule.approximate

    @property
    def by_step(self) -> bool:  # type: ignore[override]
        return self.rule.by_step

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        return {**self.rule.prepare(h, steps), **forgotten(h, self.bits)}

    def begin(self, h: dict[str, Array], z: dict[str, Array]) -> dict[str, Array]:
        return self.rule.begin(h, z)


def with_gradient_link(rule: Optimizer, bits: int = BITS) -> WithGradientLink:
    """A rule whose parameters read the gradient of their own step, with an inverse: they read d <- 2^-k d + (1 - 2^-k) g.

    rule: its last link takes (h, z, g), which `hg.train` refuses without this. bits: k, from 1 to 16: what the link costs a
    parameter and step. It is a slightly different algorithm: of each gradient, 2^-k is applied a step late, 2^-2k two steps
    late, and so on; k = 16 is the rule to 1.5e-5. All other links see g itself. State: the rule's, and "gradient".
    """
    if not isinstance(rule, Optimizer):
        raise TypeError(f"hg.with_gradient_link wraps an optimizer, which comes first; got {describe(rule)}.")
    if not isinstance(getattr(rule, "chain", None), tuple):
        raise TypeError(
            f"hg.with_gradient_link wraps a rule, and {type(rule).__name__} wraps others: put it around the rule inside."
        )
    if not reads_gradient(rule.chain):
        raise TypeError(
            f"hg.with_gradient_link: the parameters of {type(rule).__name__} do not move by the gradient of their own step: "
            "it needs no link. Pass it to hg.train as it is."
        )
    return WithGradientLink(rule, bits=bits)


@functools.cache
def gradient_link(bits: int) -> Link:
    """d <- 2^-k d + (1 - 2^-k) g."""
    leak = 1 - 2.0**-bits
    return Link(GRADIENT, lambda h, z, g: leak * g, decay=_FORGOTTEN, bits_a_step=bits)


@dataclasses.dataclass(frozen=True)
class _Linked:
    """The increment of parameters that read the link in place of the gradient; equal where the rule's is the same."""

    increment: Callable[..., Array]

    def __post_init__(self) -> None:
        # As the rule's own, which may compute something else at the next call where it is a user's.
        object.__setattr__(self, "__module__", self.increment.__module__)

    def __call__(self, h: View, z: View) -> Array:
        return self.increment(h, z, z.gradient)


def linked(chain: tuple[Link, ...], bits: int) -> tuple[Link, ...]:
    """The links of a rule, after one that follows the gradient, which the last reads in place of it."""
    *others, params = chain
    assert params.increment is not None, "of a rule, which is not frozen"
    return (gradient_link(bits), *others, params._replace(increment=_Linked(params.increment)))


def forgotten(h: dict[str, Array], bits: int) -> dict[str, Array]:
    """The decay of the link, for `prepare`."""
    return {_FORGOTTEN: jnp.full((1,), 2.0**-bits, jnp.result_type(*h.values() or [float]))}


def check_bits(rule: Optimizer) -> None:
    bits = rule.bits  # type: ignore[attr-defined]
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 16:
        raise ValueError(
            f"{type(rule).__name__}: `bits` of the gradient link must be an int from 1 to 16; got {bits!r}. 2^-bits is how "
            "much of a gradient comes a step late: 4 is a good choice."
        )
