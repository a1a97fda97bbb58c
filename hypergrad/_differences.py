"""Differences along a direction, for all that holds a derivative against them. Knows nothing of training."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array


def moved(x: Any, direction: Any, size: float) -> Any:
    """x + size direction, leaf by leaf."""
    return jax.tree.map(lambda a, d: a + size * d, x, direction)


def central(f: Callable[[Any], Array], x: Any, direction: Any, size: float) -> float:
    """D(h) = (f(x + h d) - f(x - h d)) / 2h, off by O(h^2)."""
    return float(f(moved(x, direction, size)) - f(moved(x, direction, -size))) / (2 * size)


def extrapolated(coarse: float, fine: float) -> float:
    """(4 D(h/2) - D(h)) / 3, off by O(h^4) (Richardson)."""
    return (4 * fine - coarse) / 3
