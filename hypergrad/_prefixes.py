"""Why a tree of hyperparameters is no prefix of a tree of parameters, for errors.

Invariant: a hint is true of the two trees, and says what to write instead.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax


MOST = 300  # characters of a structure: that of a model is pages


def outline(tree: Any, is_leaf: Any = None) -> str:
    """The structure of a tree, or the class of a model, whose structure nobody can read."""
    if isinstance(tree, eqx.Module):
        return f"an equinox {type(tree).__name__}"
    if _is_of_flax(tree):
        return f"a flax {type(tree).__name__}"
    shown = str(jax.tree.structure(tree, is_leaf))
    return shown if len(shown) <= MOST else f"{shown[:MOST]} ..."


def hint(value: Any, tree: Any) -> str:
    """What may be meant by a value that is no prefix of the tree: a sentence with a space before it, or nothing."""
    if isinstance(value, list) and not isinstance(tree, list):
        return " A list is a tree of its entries: make it an array, jnp.array([...])."
    if model := _model_by_names(value, tree):
        return (
            f" A dict of field names is no prefix of {model}: make one of the model, rates = jax.tree.map(lambda _: 0.1, "
            "params), and change parts of it, equinox.tree_at(lambda m: m.layers[0], rates, 0.01)."
        )
    if isinstance(value, dict) and _is_of_flax(tree):
        return f" A dict is no prefix of it: make it a {type(tree).__name__} as well, {type(tree).__name__}({{...}})."
    return _other_keys(value, tree, "")


def _other_keys(value: Any, tree: Any, path: str) -> str:
    """The first place at which two mappings have other keys; "" if there is none."""
    if not isinstance(value, Mapping) or not isinstance(tree, Mapping):
        return ""
    if value.keys() != tree.keys():
        more, less = ([repr(k) for k in a if k not in b] for a, b in ((value, tree), (tree, value)))
        found = [f"has {_first(more)}, which the latter has not"] * bool(more) + [f"lacks {_first(less)}"] * bool(less)
        return f" {f'At {path} the' if path else 'The'} former {', and '.join(found)}."
    return next((x for k in value if (x := _other_keys(value[k], tree[k], f"{path}[{k!r}]"))), "")


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _is_of_flax(tree: Any) -> bool:
    """A FrozenDict or an nnx.State; flax is not imported here."""
    return isinstance(tree, Mapping) and type(tree).__module__.startswith("flax.")


def _model_by_names(value: Any, tree: Any) -> str:
    """The class of an equinox model that a dict stands for; "" if there is none."""
    if not isinstance(value, dict):
        return ""
    if isinstance(tree, eqx.Module):
        return type(tree).__name__
    parts = [(x, tree[name]) for name, x in value.items() if name in tree] if isinstance(tree, dict) else []
    return next((model for x, part in parts if (model := _model_by_names(x, part))), "")
