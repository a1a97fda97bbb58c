"""Hyperparameters of all steps, and of one: what has an axis of steps is scanned over, the rest stays.

Invariant: `join_steps` puts together what `split_steps` took apart, at each step.
"""

import jax
from jax import Array

from hypergrad.optimizers.expand import Hypers
from hypergrad.run.spec import Run


def split_steps(h: list[Hypers], steps: int) -> tuple[list[Hypers], list[Hypers]]:
    """(constant, per step): the step axis dropped from the first, scanned over in the second; scalars squeezed."""
    constant = [{k: _squeezed(x[0]) for k, x in own.items() if x.shape[0] != steps} for own in h]
    stepped = [{k: jax.vmap(_squeezed)(x) for k, x in own.items() if x.shape[0] == steps} for own in h]
    return constant, stepped


def one_step(h: list[Hypers], steps: int) -> list[Hypers]:
    """The hyperparameters of the first step."""
    constant, stepped = split_steps(h, steps)
    return join_steps(constant, jax.tree.map(lambda x: x[0], stepped))


def split(run: Run, h: list[Hypers]) -> tuple[list[Hypers], list[Hypers]]:
    """`split_steps`, for `Run.outside_loop`."""
    return split_steps(h, run.steps)


def join_steps(constant: list[Hypers], stepped: list[Hypers]) -> list[Hypers]:
    return [{**c, **s} for c, s in zip(constant, stepped, strict=True)]


def _squeezed(x: Array) -> Array:
    return x.reshape(()) if x.size == 1 else x
