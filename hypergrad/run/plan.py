"""When buffers spill: one schedule for all links that have the same decay.

Invariant: both passes read the same.
"""

from typing import Any

from hypergrad.exact import Schedule
from hypergrad.optimizers.expand import Hypers, link_numerators
from hypergrad.run.spec import Run


Plan = list[Schedule]


def schedules(run: Run, h: list[Hypers]) -> Plan:
    found: dict[int, Schedule] = {}
    for block, own, row in zip(run.blocks, h, run.shared, strict=True):
        for link, index in zip(block.chain, row, strict=True):
            if index is not None and index not in found:
                numerators = link_numerators(link, own, run.steps)
                found[index] = block.buffer(link).schedule(numerators, link.denominator)
    return [found[index] for index in range(len(found))]


def by_link(run: Run, shared: list[Any]) -> list[dict[str, Any]]:
    """Of each block, by decaying link."""
    return [
        {link.name: shared[index] for link, index in zip(block.chain, row, strict=True) if index is not None}
        for block, row in zip(run.blocks, run.shared, strict=True)
    ]
