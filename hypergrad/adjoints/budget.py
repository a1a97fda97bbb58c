"""A budget of memory, and how a run is cut where it does not hold the words of all steps.

Invariant: states that are kept between segments, and the words of the longest, take no more bytes than the budget.
"""

import bisect
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from hypergrad._placement import entries_here
from hypergrad.adjoints.capacity import Given, decaying, words_of
from hypergrad.adjoints.retry import may_repeat
from hypergrad.exact import HEADS, WORD_BITS
from hypergrad.run.spec import Inputs, Run


LEVELS = 3  # of segments within segments

_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


class TooLittleError(ValueError):
    """A budget in which no cut of the run fits. smallest: bytes of one that works."""

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


def bytes_of(budget: Any, name: str = "memory_budget") -> int:
    """2048 or "512MiB" -> bytes."""
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    units = "|".join(_UNITS)
    if isinstance(budget, str) and (match := re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({units})\s*", budget)):
        size = int(Fraction(match[1]) * _UNITS[match[2]])
        if size > 0:
            return size
    raise ValueError(f'`{name}` must be bytes, an int above 0, or a string such as "512MiB" or "2 GB"; got {budget!r}.')


def shown_bytes(size: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size} B"


def cut(run: Run, inputs: Inputs, budget: int, capacity: Given) -> Run:
    """The run cut as little as the budget allows, in bytes.

    Not at all where it holds the words of all steps, else into the fewest segments that fit, each of which but the last is
    replayed once; where none do, into segments of segments, replayed once more a level. Raises `TooLittleError` with the
    smallest budget.
    capacity: 32-bit words of all steps, as users give it.
    """
    state, lossy = _bytes_of_state(run, inputs), list(decaying(run, inputs, capacity))

    def needed(candidate: Run) -> int:
        entries = (
            (words_of(candidate, block.buffer(link), lost) + (block.buffer(link) == HEADS)) * size
            for block, link, lost, size in lossy
        )
        rooms = 2 if candidate.segments and may_repeat(run) else 1  # the last segment's, should the way back begin once more
        return sum(candidate.segments) * state + rooms * sum(entries) * WORD_BITS // 8

    smallest: float = math.inf
    for levels in range(LEVELS + 1):
        for candidate in _cuts(run, levels):
            if sum(candidate.segments) * state >= smallest:
                break  # more segments only take more
            if needed(candidate) <= budget:
                return _replayed_least(candidate, lambda candidate: needed(candidate) <= budget)
            smallest = min(smallest, needed(candidate))
    raise TooLittleError(
        f"memory_budget={shown_bytes(budget)} is too little to reverse {run.steps} steps: states of {shown_bytes(state)} "
        f"are kept now and then, and the lost digits between two. The smallest that works is {smallest} bytes.",
        int(smallest),
    )


def _cuts(run: Run, levels: int) -> Iterator[Run]:
    """Into more and more segments, each of which is cut into as many, and so on."""
    if not levels:
        yield run
        return
    for count in range(2, run.steps):  # a loop of one round XLA takes apart, and keeps three times the words
        many = count**levels
        length = min(-(-run.steps // (many + 1)), (run.steps - 1) // many)
        if not length:
            return
        yield dataclasses.replace(run, first=many * length, segments=(count,) * levels)


def _replayed_least(run: Run, fits: Callable[[Run], bool]) -> Run:
    """With as many steps as fit in the last segment, which alone is not trained once more."""
    if not run.first:
        return run
    many = math.prod(run.segments)
    cut_at = lambda length: dataclasses.replace(run, first=many * length)  # noqa: E731
    lengths = range(1, run.first // many + 1)
    return cut_at(lengths[bisect.bisect_left(lengths, True, key=lambda length: fits(cut_at(length)))])


def _bytes_of_state(run: Run, inputs: Inputs) -> int:
    """Integers of all links, and heads, of one device."""
    links = [
        (block, link, own[link.name]) for block, own in zip(run.blocks, inputs.values, strict=True) for link in block.chain
    ]
    heads = [4 if link.decay and block.buffer(link) == HEADS else 0 for block, link, _ in links]
    return sum(entries_here(x) * (8 * (1 + link.wide) + head) for (_, link, x), head in zip(links, heads, strict=True))
