"""When buffers spill: one schedule for all links that have the same decay.

Invariant: both passes read the same, kept for all steps or, of a run in segments, computed again from where it stood before
each.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.exact import Mark
from hypergrad.optimizers.block import Block
from hypergrad.optimizers.chain import Link
from hypergrad.optimizers.expand import Hypers, link_numerators
from hypergrad.run.spec import Run


class RunSchedule(NamedTuple):
    """Of one decay, over all steps."""

    entries: Any  # of each step; None of a run in segments
    before: Mark | None  # each segment, stacked; None of a run that has none
    end: Mark


Plan = list[RunSchedule]


class Span(NamedTuple):
    """Steps in a row."""

    first: Any  # int, or int32 [] inside of a loop over spans
    length: int

    def of(self, tree: Any) -> Any:
        """Of arrays of all steps, those of these."""
        first = jnp.asarray(self.first, jnp.int32)  # a number would make each span a program
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, self.length), tree)


def schedules(run: Run, h: list[Hypers]) -> Plan:
    return [(_in_segments if run.in_segments else _whole)(run, *source) for source in sources(run, h)]


def _whole(run: Run, block: Block, link: Link, h: Hypers) -> RunSchedule:
    entries, end = block.buffer(link).schedule(link_numerators(link, h, run.steps), link.denominator)
    return RunSchedule(entries, None, end)


def _in_segments(run: Run, block: Block, link: Link, h: Hypers) -> RunSchedule:
    """Of one segment at a time, so that nothing is as long as the run."""
    buffer, count = block.buffer(link), (run.first or run.steps) // run.stride

    def after(mark: Mark, span: Span) -> Mark:
        return buffer.schedule(_numerators(run, link, h, span), link.denominator, mark).end

    def one(mark: Mark, k: Array) -> tuple[Mark, Mark]:
        return after(mark, Span(k * run.stride, run.stride)), mark

    end, before = jax.lax.scan(one, buffer.start(), jnp.arange(count, dtype=jnp.int32))
    if rest := run.steps - count * run.stride:
        before = jax.tree.map(lambda x, last: jnp.append(x, last), before, end)
        end = after(end, Span(count * run.stride, rest))
    return RunSchedule(None, before, end)


def marks(plan: Plan, segment: Any) -> list[Mark]:
    """Where each schedule stands before a segment, which may be traced."""
    return [jax.tree.map(lambda x: x[segment], schedule.before) for schedule in plan]


def entries_of(run: Run, length: int, h: list[Hypers], before: list[Mark], first: Array) -> list[Any]:
    """Of the steps from `first` on, with stacks that are empty there. before: as `marks` gives it."""
    result, span = [], Span(first, length)
    for (block, link, own), mark in zip(sources(run, h), before, strict=True):
        n = _numerators(run, link, own, span)
        result.append(block.buffer(link).schedule(n, link.denominator, mark.restarted()).entries)
    return result


def numerators(run: Run, h: list[Hypers]) -> list[Array]:
    """Of each schedule, all that it follows from: int64 [steps]."""
    return [link_numerators(link, own, run.steps) for _, link, own in sources(run, h)]


def _numerators(run: Run, link: Link, h: Hypers, span: Span) -> Array:
    rho = h[str(link.decay)]
    own = span.of(rho) if rho.shape[0] == run.steps else rho
    return link_numerators(link, {str(link.decay): own}, span.length)


def sources(run: Run, h: list[Hypers]) -> Iterator[tuple[Block, Link, Hypers]]:
    """Of each schedule, a link that has it."""
    found = set()
    for block, own, row in zip(run.blocks, h, run.shared, strict=True):
        for link, index in zip(block.chain, row, strict=True):
            if index is not None and index not in found:
                found.add(index)
                yield block, link, own


def by_link(run: Run, shared: list[Any]) -> list[dict[str, Any]]:
    """Of each block, by decaying link."""
    return [
        {link.name: shared[index] for link, index in zip(block.chain, row, strict=True) if index is not None}
        for block, row in zip(run.blocks, run.shared, strict=True)
    ]
