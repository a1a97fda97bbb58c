"""Whole numbers as users give them.

Invariant: what is taken is a Python int.
"""

import operator
from typing import Any

import numpy as np


def as_int(x: Any) -> int | None:
    """A whole number of Python's or NumPy's; None: it is none, or a yes or no."""
    if isinstance(x, (bool, np.bool_)):
        return None
    try:
        return operator.index(x)
    except TypeError:  # of a traced one, too
        return None
