"""Kronecker factors by the axes of a parameter, in the order of its own entries."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.curvature._kronecker import Diagonal, Kronecker
from hypergrad.curvature._order import order_of
from hypergrad.curvature._quantities import analysed, quantities
from hypergrad.curvature._uses import Found


def factors_by_axis(
    loss: Callable[..., Any],
    params: Any,
    theta: Any,
    batch: Any,
    which: str,
    merged: Callable[[tuple[int, ...]], tuple[int, ...]],
    key: Array | None = None,
) -> Any:
    """'kfac', 'kflr' or 'kfra' as a matrix for each axis: a pytree like `params` with lists of [n, n] at its leaves.

    merged: shape of a leaf -> that of a vector or a matrix with the same entries in the same order, whose axes are meant. A
    leaf without such factors has an empty list: what is used otherwise than in a layer, in groups, or with inputs and
    outputs along the same axis of `merged`.
    """
    blocks = quantities(loss, params, theta, batch, which, key=key)[which]
    found, _, _ = analysed(loss, params, theta, batch)
    leaves, tree = jax.tree.flatten(params)
    shapes = [jnp.shape(x) for x in leaves]
    each = zip(shapes, jax.tree.leaves(blocks, is_leaf=lambda x: isinstance(x, (Kronecker, Diagonal))), strict=True)
    return jax.tree.unflatten(tree, [_by_axis(found, i, shape, merged(shape), b) for i, (shape, b) in enumerate(each)])


def _by_axis(found: Found, leaf: int, shape: tuple[int, ...], merged: tuple[int, ...], block: Any) -> list[Array]:
    if isinstance(block, Diagonal):
        return [jnp.diag(block.values.reshape(-1))] if len(merged) == 1 else []
    if block.b.shape[0] > 1:
        return []
    if block.a is None:  # it is only added
        return _of_vector(block.b[0], merged)
    a, b, order = block.a[0], block.b[0], order_of(found, found.of(leaf)[0])[0]
    if len(merged) == 1:
        places = np.argsort(order.reshape(-1))
        return [jnp.kron(a, b)[places][:, places]]
    of_rows, of_columns = order // merged[1], order % merged[1]
    for rows, columns, one, other in ((of_rows, of_columns, a, b), (of_rows.T, of_columns.T, b, a)):
        if (rows == rows[:, :1]).all() and (columns == columns[:1]).all():
            return [_sorted(one, rows[:, 0]), _sorted(other, columns[0])]
    return []


def _of_vector(b: Array, merged: tuple[int, ...]) -> list[Array]:
    """Of an axis of one, zero: there is no factor."""
    none = jnp.zeros((1, 1), b.dtype)
    if len(merged) == 1:
        return [b]
    return [none, b] if merged[0] == 1 else [b, none] if merged[1] == 1 else []


def _sorted(factor: Array, places: np.ndarray) -> Array:
    """factor[i, j] belongs to the entries places[i], places[j] of its axis."""
    order = np.argsort(places)
    return factor[order][:, order]
