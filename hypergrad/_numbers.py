"""Numbers as users give them: NumPy holds some that JAX would take for others.

Invariant: what passes has the value in JAX that it has where it came from.
"""

from typing import Any

import jax
import numpy as np

from hypergrad._placement import at_hand


def check_numbers(name: str, tree: Any) -> None:
    """Of each leaf that is NumPy's: no masked entry, no integer that JAX would cut off; of those that are JAX's, none in
    float64 where that is not set. name: before the leaf's path."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        where = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(x, (np.ndarray, np.generic)):
            check_number(where, x)
        elif isinstance(x, jax.Array) and x.dtype == np.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise ValueError(f"{where} is float64, and jax_enable_x64 is not set here: call it in jax.enable_x64(True).")


def check_number(where: str, x: Any, dtype: Any = None) -> None:
    """dtype: what integers are read as; None: by the setting of x64."""
    if isinstance(x, (jax.Array, jax.core.Tracer, bool, float, complex)):
        return
    if np.ma.is_masked(x):
        raise TypeError(f"{where} has masked entries: fill them, or pass the mask as an array of its own.")
    x = np.asarray(x)
    if x.dtype.kind == "O":
        raise TypeError(f"{where} is an array of Python objects: make it one of numbers, as by x.astype(float).")
    if x.dtype.kind not in "iu":
        return
    dtype = jax.dtypes.canonicalize_dtype(x.dtype) if dtype is None else dtype
    if x.dtype != dtype and not (x.astype(dtype) == x).all():
        raise ValueError(
            f"{where} has integers beyond {dtype}, as which JAX reads them: pass some that fit, or set jax_enable_x64."
        )


def check_finite(where: str, x: Any) -> None:
    if at_hand(x) and not np.isfinite(np.asarray(x, float)).all():
        raise ValueError(f"{where} is not finite: give it a number to begin with.")
