"""Hyperparameters of all steps, and of one: what has an axis of steps is scanned over, the rest stays.

Invariant: `join_steps` puts together what `split_steps` took apart, at each step.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.optimizers.expand import Hypers
from hypergrad.run.spec import Run


def split_steps(h: list[Hypers], steps: int) -> tuple[list[Hypers], list[Hypers]]:
    """(constant, per step): the step axis dropped from the first, scanned over in the second; scalars squeezed."""
    constant = [{k: squeezed(x[0]) for k, x in own.items() if x.shape[0] != steps} for own in h]
    stepped = [{k: jax.vmap(squeezed)(x) for k, x in own.items() if x.shape[0] == steps} for own in h]
    return constant, stepped


def squeezed(x: Array) -> Array:
    """Of one step: what counts for all entries of a leaf is a number, whatever axes it has."""
    return x.reshape(()) if x.size == 1 else x


def like_one_step(h: list[Hypers]) -> list[dict[str, Any]]:
    """The hyperparameters of one step, as `ShapeDtypeStruct`s."""
    shape = lambda x: () if math.prod(x.shape[1:]) == 1 else x.shape[1:]  # noqa: E731
    return [{key: jax.ShapeDtypeStruct(shape(x), x.dtype) for key, x in own.items()} for own in h]


def split(run: Run, h: list[Hypers]) -> tuple[list[Hypers], list[Hypers]]:
    """`split_steps`, for `Run.outside_loop`."""
    return split_steps(h, run.steps)


def split_first(run: Run, h: list[Hypers]) -> tuple[list[Hypers], list[Hypers]]:
    """`split`, of which one step."""
    constant, stepped = split(run, h)
    return constant, jax.tree.map(lambda x: x[0], stepped)


def join_steps(constant: list[Hypers], stepped: list[Hypers]) -> list[Hypers]:
    return [{**c, **s} for c, s in zip(constant, stepped, strict=True)]


def joined(run: Run, dconstant: list[Hypers], dstepped: list[Hypers], h: list[Hypers]) -> list[Hypers]:
    """The inverse of `split`: cotangents like h."""
    dh, like = join_steps(dconstant, dstepped), [jax.tree.map(jnp.shape, own) for own in h]
    changed = [{k: d for k, d in dj.items() if d.shape != own[k]} for dj, own in zip(dh, like, strict=True)]
    shapes = tuple(tuple((k, own[k]) for k in dj) for dj, own in zip(changed, like, strict=True))
    return join_steps(dh, run.outside_loop(_reshaped, changed, static=(shapes,)))


def _reshaped(_: Run, shapes: tuple[tuple[tuple[str, Any], ...], ...], dh: list[Hypers]) -> list[Hypers]:
    """shapes: of each block, by hyperparameter."""
    return [{k: own[k].reshape(shape) for k, shape in row} for own, row in zip(dh, shapes, strict=True)]
