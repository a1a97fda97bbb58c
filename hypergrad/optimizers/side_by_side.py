"""Which leaves of the parameters lie side by side in one block.

Invariant: the leaves of a block share the rule and every decay; those of one of its parts share every hyperparameter; and
its parts have as many entries each.

What costs by the piece (a kernel, its compilation, a schedule) costs once for leaves that lie side by side. A block of
several parts has an axis for them, along which a hyperparameter that differs has one value each.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jax import Array

from hypergrad._placement import may_be_divided
from hypergrad.optimizers.block import Parts
from hypergrad.optimizers.chain import foreign
from hypergrad.optimizers.expand import Field, shared_value
from hypergrad.optimizers.partition import Stack
from hypergrad.optimizers.transform import Transformed
from hypergrad.schedules import PerStep


LARGE = 1 / 8  # of all parameters: a leaf of more than that stays by itself, since every step copies those that do not


def side_by_side(
    stacks: list[Stack], fields: list[list[dict[str, Field]]], leaves: list[Array], elsewhere: bool, by_parts: bool
) -> list[Parts]:
    """The blocks: small leaves of one dtype that share what the invariant says, where the rule works entry by entry, and
    that are not divided over devices: side by side, each device would have all of them.

    elsewhere: whether it is to be the same on any number of devices, as what all leaves share is then added in one order.
    by_parts: whether a block may have more than one.
    """
    total = sum(x.size for x in leaves)
    alike: dict[tuple[Hashable, ...], list[int]] = {}
    for i, (stack, own, x) in enumerate(zip(stacks, fields, leaves, strict=True)):
        alone = not stack.entrywise or x.size > LARGE * total or may_be_divided(x, elsewhere)
        values = [shared_value(field.values[i]) for layer in own for field in layer.values()]
        alike.setdefault((i if alone else None, x.dtype, _paths(stack), *values), []).append(i)
    blocks: dict[Hashable, list[tuple[int, ...]]] = {}
    for (by_itself, *_), part in alike.items():
        first = part[0]
        stack = stacks[first]
        key: tuple[Hashable, ...] = (first,)
        if by_parts and by_itself is None and _reads_by_entry(stack):
            size = sum(leaves[i].size for i in part)
            key = (size, leaves[first].dtype, _paths(stack), *_of_all_parts(stack, fields[first], first))
        blocks.setdefault(key, []).append(tuple(part))
    return list(map(tuple, blocks.values()))


def _paths(stack: Stack) -> tuple[str, ...]:
    return tuple(layer.path for layer in stack.layers)


def keeps_shape(own: tuple[int, ...], leaves: Sequence[Any], elsewhere: bool) -> bool:
    """Whether a block that might be a vector is none: an array divided along its second axis would be on every device."""
    return len(own) == 1 and may_be_divided(leaves[own[0]], elsewhere)


def _of_all_parts(stack: Stack, fields: list[dict[str, Field]], leaf: int) -> list[Hashable]:
    """What the parts of a block have in common: the value of each decay, and of any other field what kind it is of."""
    decays = {link.decay for link in stack.chain}
    found: list[Hashable] = []
    for layer, own in zip(stack.layers, fields, strict=True):
        for key, field in own.items():
            value = field.values[leaf]
            found.append(shared_value(value) if layer.is_rule and key in decays else _kind(value))
    return found


def _kind(value: Any) -> Hashable:
    """Of a number, or of one for each step; else of nothing but itself."""
    raw, axes = (value.values, 1) if isinstance(value, PerStep) else (value, 0)
    return isinstance(value, PerStep) if np.ndim(raw) == axes and value is not None else object()


def _reads_by_entry(stack: Stack) -> bool:
    """Whether hyperparameters may differ by part, decays apart: all that reads them is the library's, which computes entry
    by entry (somebody else's may take the first for all), and the decays are fields: one that `prepare` makes
    may be made of what differs."""
    rule: Any = stack.rule.optimizer
    decays = {link.decay for link in stack.chain if link.decay}
    made = type(rule).prepare, type(rule).begin
    around = (layer.optimizer.transform for layer in stack.layers if isinstance(layer.optimizer, Transformed))
    reads = [*made, *(link.increment for link in stack.chain if link.increment), *around]
    return decays <= rule.hyperparameters().keys() and not any(map(foreign, reads))
