"""A state leaf by leaf, and as another run of the same leaves lays it out.

Invariant: `laid_out(run, by_leaf(run, state))` is the state, bit for bit.
"""

from typing import Any

from jax import Array

from hypergrad.optimizers.block import Block
from hypergrad.run.plan import by_link, numerators
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.step import Slot, Slots, State


Leaf = tuple[bool, int]  # whether it is one of the parameters, else of the statistics; and which


def by_leaf(run: Run, state: State) -> dict[Leaf, Slots]:
    """state: without words."""
    found: dict[Leaf, Slots] = {}
    for block, slots in zip(run.blocks, state, strict=True):
        parts = {name: _split(block, slot) for name, slot in slots.items()}
        for k, leaf in enumerate(block.leaves):
            found[block.of_parameters, leaf] = {name: of_link[k] for name, of_link in parts.items()}
    return found


def laid_out(run: Run, leaves: dict[Leaf, Slots]) -> State:
    """The inverse of `by_leaf`. What leaves that lie side by side share is that of the first: see that it is of all."""
    return [
        {
            link.name: _joined(block, [leaves[block.of_parameters, leaf][link.name] for leaf in block.leaves])
            for link in block.chain
        }
        for block in run.blocks
    ]


def links_of(run: Run) -> dict[Leaf, list[str]]:
    """Of each leaf."""
    return {(block.of_parameters, i): [link.name for link in block.chain] for block in run.blocks for i in block.leaves}


def decays_of(run: Run, inputs: Inputs) -> dict[tuple[bool, int, str], Array]:
    """Of each leaf and link that decays, the numerators of all steps."""
    found = by_link(run, run.outside_loop(numerators, inputs.h))
    return {
        (block.of_parameters, i, name): own
        for block, of_block in zip(run.blocks, found, strict=True)
        for i in block.leaves
        for name, own in of_block.items()
    }


def _split(block: Block, slot: Slot) -> list[Slot]:
    high, low, head = (None if x is None else block.split(x) for x in _arrays(slot))
    return [
        _with(slot, high[k], None if low is None else low[k], None if head is None else head[k])  # type: ignore[index]
        for k in range(len(block.leaves))
    ]


def _joined(block: Block, slots: list[Slot]) -> Slot:
    columns = zip(*map(_arrays, slots), strict=True)
    return _with(slots[0], *(None if own[0] is None else block.joined(list(own)) for own in columns))


def _arrays(slot: Slot) -> tuple[Any, Any, Any]:
    """Those that have an entry for each weight."""
    return slot.value.high, slot.value.low, getattr(slot.digits, "head", None)


def _with(slot: Slot, high: Any, low: Any, head: Any) -> Slot:
    """The inverse of `_arrays`."""
    digits = slot.digits if head is None else slot.digits._replace(head=head)
    return Slot(slot.value._replace(high=high, low=low), digits)
