"""What a rule may be given, where only some values make sense."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax import Array

from hypergrad._placement import at_hand
from hypergrad.hypers import natural
from hypergrad.optimizers.chain import Optimizer


def check_choice(rule: Optimizer, field: str, choices: Iterable[str]) -> None:
    if (given := getattr(rule, field)) not in choices:
        names = ", ".join(map(repr, choices))
        raise ValueError(f"hg.{type(rule).__name__}: `{field}` must be one of {names}; got {given!r}.")


def check_int(rule: Optimizer, field: str, least: int) -> None:
    given = getattr(rule, field)
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ValueError(f"hg.{type(rule).__name__}: `{field}` must be an int of at least {least}; got {given!r}.")


def check_positive(rule: Optimizer, field: str) -> None:
    """Where its values are known."""
    for x in jax.tree.leaves(natural(getattr(rule, field))):
        if _known(x) and not np.all(np.asarray(x) > 0):
            raise ValueError(f"hg.{type(rule).__name__}: `{field}` must be positive; got {x!r}.")


def check_of_leaves(rule: Optimizer, h: dict[str, Array], fields: Iterable[str], like: str = "the factors do") -> None:
    """Of what is prepared: refuse one for each weight of what belongs to a whole leaf."""
    for name in fields:
        if name in h and h[name][0].size > 1:
            raise ValueError(
                f"hg.{type(rule).__name__}: `{name}` belongs to a whole leaf, as {like}: one value, or one per step; got "
                f"one for each of {h[name][0].shape}."
            )


def known_zero(values: Any) -> bool:
    """Whether there is nothing but zeros in it, for certain."""
    return all(_known(x) and not np.any(np.asarray(x)) for x in jax.tree.leaves(natural(values)))


def _known(x: Any) -> bool:
    return at_hand(x) and np.issubdtype(np.asarray(x).dtype, np.number)
