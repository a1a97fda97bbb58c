"""What leaves of hyperparameters are called, in errors, records and curves.

Invariant: two leaves of a tree have two names.
"""

import collections
from typing import Any

import jax


def hyper_path(path: Any) -> str:
    """The path of a leaf as the user wrote it: without the fields of domains and `PerStep`."""
    return jax.tree_util.keystr(_as_written(path))


def hyper_name(path: Any) -> str:
    """The same as a name for records and curves: "l2/hidden/w", and "hypers" for a hyperparameter that is all there is."""
    return jax.tree_util.keystr(_as_written(path), simple=True, separator="/") or "hypers"


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(name, leaf) of each: its `hyper_name`, and where that is another's too, all of its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = collections.Counter(hyper_name(path) for path, _ in leaves)
    whole_path = jax.tree_util.keystr
    return [(name if names[name := hyper_name(path)] == 1 else whole_path(path), x) for path, x in leaves]


def _as_written(path: Any) -> tuple[Any, ...]:
    return tuple(k for k in path if getattr(k, "name", None) not in ("unconstrained", "values"))
