"""Cotangents of what a step computes with: the gradient, before and after its transformations, and the batch statistics.

Invariant: each is a function of the cotangents of the links alone where the step is linear in it.
"""

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.adjoints.link import plus, pull, spread
from hypergrad.optimizers.block import Floats
from hypergrad.optimizers.expand import Hypers
from hypergrad.run.spec import Run
from hypergrad.run.step import State, readable


def gradient_cotangent(run: Run, state: State, dz: list[Floats], h: list[Hypers]) -> list[Array]:
    """u, the cotangent of the gradient, of linear rules: no value of z or g enters it, so any will do."""
    result = []
    for j in run.parameters:
        block = run.blocks[j]
        anything = u = jnp.zeros(block.shape, block.dtype)
        for link in reversed(block.chain[:-1]):
            back = pull(block, link, dz[j][link.name], h[j], readable(run, j, link, state), anything)
            u, dz = plus(u, back.g), spread(run, j, dz, back.read)
        result.append(u)
    return result


def at_rest(g: list[Array], u: list[Array], unit: Array) -> list[Array]:
    """u, the cotangent of the gradient; where that is exactly zero, within 3/8 of the exponents of the accumulators' dtype
    above `unit`, the largest cotangent that comes in.

    A weight that has no gradient stays where it is, but has a derivative, which Adam multiplies by rate / eps times the
    curvature at each step. Were it to overflow, its products with what is zero there would be NaN in all that they enter.
    """
    result = []
    for gj, uj in zip(g, u, strict=True):
        most = float(jnp.finfo(uj.dtype).max) ** (3 / 8) * unit.astype(uj.dtype)
        result.append(jnp.where(gj == 0, jnp.clip(uj, -most, most), uj))
    return result


def pull_transforms(
    run: Run, h: list[Hypers], w: list[Array], g: list[Array], z: list[Floats], u: list[Array]
) -> tuple[list[Hypers], list[Array], list[Array], list[Floats]]:
    """From the cotangent of what the chains saw to those of the hyperparameters, the parameters, the gradient, and the links
    that are read."""
    return jax.vjp(run.transformed, h, w, g, z)[1](u)


def statistics_cotangent(run: Run, state: State, dz: list[Floats], h: list[Hypers]) -> list[Array]:
    """That of what the statistics follow: linear in it, so that no value enters. None where nobody differentiates them."""
    rows = [(j, run.blocks[j].chain[0]) for j in run.statistics if dz[j]]
    zero = lambda j, k: jnp.zeros_like(dz[j][k.name])  # noqa: E731
    found = [pull(run.blocks[j], k, dz[j][k.name], h[j], {}, zero(j, k)).g for j, k in rows]
    return [x for x in found if x is not None]
