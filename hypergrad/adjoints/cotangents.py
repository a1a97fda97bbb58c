"""Cotangents of what a step computes with: the gradient, before and after its transformations, and the batch statistics.

Invariant: each is a function of the cotangents of the links alone where the step is linear in it.
"""

from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.adjoints.link import plus, pull, spread
from hypergrad.optimizers.block import Block, Floats
from hypergrad.optimizers.chain import Link
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


def first_cotangents(run: Run, dz: list[Floats]) -> list[Array]:
    """What `gradient_cotangent` multiplies by `common_factor`; of blocks that are frozen zeros."""
    links = [(j, run.blocks[j].chain[0]) for j in run.parameters]
    return [dz[j][k.name] if k.increment is not None else jnp.zeros_like(dz[j][k.name]) for j, k in links]


def common_factor(run: Run, h: list[Hypers]) -> Array | None:
    """c, where the cotangent of the gradient is c times that of the one link before the parameters, for all weights alike.

    Products with the Jacobian are then taken along that cotangent, which is there, and multiplied by c where they are added
    up: u needs no array, and no kernel. None: more than one factor, or none that is a number.
    """
    found: dict[Hashable, Array] = {}
    for j in run.parameters:
        block, numbers = run.blocks[j], dict(run.common[j])
        link, zero = block.chain[0], jnp.zeros([1] * len(block.shape), block.dtype)
        if link.increment is None:
            continue
        if len(block.chain) != 2 or not block.entrywise or block.reads[0]:
            return None

        def factor(h: Hypers, block: Block = block, link: Link = link, zero: Array = zero) -> Array:
            return jax.jvp(lambda g: block.increment(link, h, {}, g), (zero,), (jnp.ones_like(zero),))[1]

        program = jax.make_jaxpr(factor)(h[j]).jaxpr
        if program.outvars[0].aval.size != 1:
            return None
        used = {id(x) for e in program.eqns for x in e.invars} | {id(x) for x in program.outvars}
        names = [name for name, x in zip(sorted(h[j]), program.invars, strict=True) if id(x) in used]
        key = link.increment, block.dtype, *((name, numbers.get(name, f"of block {j}")) for name in names)
        if not found:
            found[key] = factor(h[j]).reshape(())
        elif key not in found:
            return None
    return next(iter(found.values()), None)


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
