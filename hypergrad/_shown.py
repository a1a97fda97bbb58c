"""How hyperparameters and their hypergradients print: numbers where they are known, else shapes; never an error."""

from typing import Any

import equinox as eqx
import jax
import numpy as np


def shown(tree: Any, steps: bool = False) -> str:
    """A tree in a line, each leaf as `numbers` has it. steps: whether its leading axis is one of steps."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, eqx.Module))  # which prints by itself
    texts = [numbers(x, steps) for x in leaves]
    alone = len(texts) == 1 and jax.tree_util.treedef_is_leaf(structure)
    return texts[0] if alone else str(jax.tree.unflatten(structure, map(_Text, texts)))


def numbers(x: Any, steps: bool = False) -> str:
    """Of a scalar its value, of an array shape, extremes and norm; of what is traced, gone or no number, what it is."""
    if not eqx.is_array_like(x):
        return repr(x)
    shape = np.shape(x)
    of = f"{shape[0]} steps" + (f" of {list(shape[1:])}" if shape[1:] else "") if steps and shape else str(list(shape))
    try:
        known = not isinstance(x, jax.core.Tracer) and not np.iscomplexobj(x)
        values = np.asarray(x, np.float64) if known else None
    except (TypeError, ValueError, RuntimeError):  # keys, arrays that were donated or are elsewhere
        values = None
    if values is None:
        return f"{getattr(x, 'dtype', type(x).__name__)} {of}"
    if not shape:
        return f"{values:.6g}"
    if not values.size:
        return of
    with np.errstate(over="ignore", invalid="ignore"):
        return f"{of}, {values.min():.4g} to {values.max():.4g}, norm {np.sqrt(np.sum(values**2)):.4g}"


class _Text:
    """What prints as it is given."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text
