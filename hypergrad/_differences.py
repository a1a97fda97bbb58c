"""Differences along a direction, for all that holds a derivative against them. Knows nothing of training."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def moved(x: Any, direction: Any, size: float) -> Any:
    """x + size direction, leaf by leaf."""
    return jax.tree.map(lambda a, d: a + size * d, x, direction)


def check_step(step: float) -> None:
    """That there is a difference of this size to take."""
    if not 0 < step < float("inf"):
        raise ValueError(f"`step` must be a finite number above 0, as the size of a difference; got {step}.")


def check_like(gradient: Any, hypers: Any) -> Any:
    """The gradient as arrays, if it has a leaf of the same shape for each of the hyperparameters."""
    by_path = lambda tree: {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}  # noqa: E731
    ours, theirs = by_path(gradient), by_path(hypers)
    shapes = lambda leaves: {path: jnp.shape(x) for path, x in leaves.items()}  # noqa: E731
    if shapes(ours) != shapes(theirs):
        raise ValueError(
            f"`gradient` must be a pytree like the hyperparameters, with shapes {shapes(theirs)}; got {shapes(ours)}."
        )
    arrays = [jnp.asarray(ours[path], jnp.result_type(like)) for path, like in theirs.items()]  # in whatever order
    return jax.tree.unflatten(jax.tree.structure(hypers), arrays)


def central(f: Callable[[Any], Array], x: Any, direction: Any, size: float) -> tuple[float, float]:
    """(D(h) = (f(x + h d) - f(x - h d)) / 2h, off by O(h^2); how far the rounding of both values may take it).

    A difference of exactly zero is one that was lost: all of the change, in the value or in what moves, may have been
    rounded away.
    """
    ends = [f(moved(x, direction, h)) for h in (size, -size)]
    unit = float(jnp.finfo(ends[0].dtype).eps) * max(abs(float(end)) for end in ends)
    difference = float(ends[0]) - float(ends[1])
    return difference / (2 * size), (unit if difference else math.inf) / (2 * size)


def extrapolated(coarse: Any, fine: Any) -> Any:
    """(4 D(h/2) - D(h)) / 3, off by O(h^4) (Richardson)."""
    return (4 * fine - coarse) / 3
