"""Preconditioned steps of bounded length: a function of the gradients and of the factors of all leaves."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.chain import View
from hypergrad.optimizers.kronecker import KFAC, Form
from hypergrad.optimizers.transform import Transformed, checked_bound, nan_below_zero


class NormConstraint(Transformed):
    """The rule of factors inside, its preconditioned gradient scaled as a whole. Made by `norm_constraint`."""

    max_norm: Any

    @property
    def transform(self) -> Callable[..., list[Array]]:  # type: ignore[override]
        return _transform(self.inner.form)  # type: ignore[attr-defined]

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.inner.form.read,)  # type: ignore[attr-defined]


def norm_constraint(optimizer: KFAC, max_norm: Any) -> NormConstraint:
    """`hg.KFAC`, `hg.KFLR` or `hg.KFRA` with P(g + l2 w) scaled by min(1, c / n), n^2 = sum over all leaves of
    <a (1 - m) P(g + l2 w), a (1 - m) (g + l2 w)>, P the inverse factors, a the learning rate, m the momentum.

    n is the length of what a step adds to the parameters, as the curvature measures it. max_norm: c, a hyperparameter like
    any other; given per group, each group is scaled by its own. One that is negative or NaN is an error; traced, it makes
    the gradient NaN. Inverses are computed once more,
    unless the rule holds them (every > 1). In `hg.partition` the leaves are those of the rule.

    Source: Ba, Grosse and Martens (2017), section 5; KFAC-JAX's norm_constraint is c^2, its learning rate a (1 - m).
    """
    if not isinstance(optimizer, KFAC):
        raise TypeError(
            "hg.norm_constraint bounds the steps of hg.KFAC, hg.KFLR or hg.KFRA, and stands next to it: other "
            f"transformations go around. Got {type(optimizer).__name__}; hg.clip_by_global_norm bounds any gradient."
        )
    return NormConstraint(optimizer, checked_bound("norm_constraint", "max_norm", max_norm))


@functools.cache
def _transform(form: Form) -> Callable[..., list[Array]]:
    def transform(h: list[View], w: list[Array], g: list[Array], z: list[View]) -> list[Array]:
        whole = [x + hj.l2 * wj for hj, wj, x in zip(h, w, g, strict=True)]
        rates = [hj.learning_rate * (1 - hj.momentum) for hj in h]
        divided = [form.divided(hj, zj, x) for hj, zj, x in zip(h, z, whole, strict=True)]
        parts = [jnp.sum(a * a * x * p) for a, x, p in zip(rates, whole, divided, strict=True)]
        square = functools.reduce(lambda a, b: a + b.astype(a.dtype), parts)
        result = []
        for hj, wj, x in zip(h, w, whole, strict=True):
            bound = nan_below_zero(hj.max_norm)
            above = ~(square <= bound**2)  # what is NaN is above, and makes all NaN
            factor = jnp.where(above, bound / jnp.sqrt(jnp.where(above, square, 1)), 1)
            result.append(factor.astype(x.dtype) * x - hj.l2 * wj)
        return result

    return transform
