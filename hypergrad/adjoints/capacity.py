"""How many words buffers set aside.

Invariant: a decay that is known loses no more words than are set aside; of others the status says when they did.
"""

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hypergrad._placement import at_hand, entries_here
from hypergrad._report import current_ledger
from hypergrad._settings import own_settings
from hypergrad.exact import PUBLIC_WORD_BITS, WORD_BITS, Buffer
from hypergrad.optimizers.block import Block, Lost, lost_by
from hypergrad.optimizers.chain import Link
from hypergrad.optimizers.expand import Hypers, link_numerators
from hypergrad.run import cuts
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Capacity


MUCH = 2**30  # bytes

Given = int | tuple[tuple[str, int], ...] | None  # 32-bit words per parameter, of every link or by link, as users give them


def given(capacity: Any) -> Given:
    """`capacity` as users write it, as a value that can be hashed; an error if it is none."""
    rows = capacity.items() if isinstance(capacity, Mapping) else capacity
    if not isinstance(rows, (tuple, type({}.items()))):
        rows = [] if capacity is None else [("", capacity)]
    is_count = lambda x: isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**31  # noqa: E731
    if not all(isinstance(name, str) and is_count(x) for name, x in rows):
        raise ValueError(
            "`capacity` must be None, a count of 32-bit words per parameter, below 2^31, or such counts by the names of "
            f'links, {{"mean": 4}}; got {capacity!r}.'
        )
    return tuple(sorted(rows)) if isinstance(capacity, (Mapping, tuple)) else capacity


def capacities(run: Run, h: list[Hypers], capacity: Given) -> Capacity:
    """Words of the buffer per parameter to allocate, for each link that decays."""
    _check_names(run, capacity)
    traced = {(j, link.name) for j, link in traced_decays(run, h) if words_given(link, capacity) is None}
    words: dict[tuple[int, str], int] = {}
    guessed: dict[str, int] = {}  # bytes, by link
    may_change = 0
    for j, link in [(j, link) for j, block in enumerate(run.blocks) for link in block.chain if link.decay]:
        block, at = run.blocks[j], (j, link.name)
        lost, is_known = lost_of(run, block, link, h[j], capacity)
        words[at] = words_of(run, block.buffer(link), lost)
        size = words[at] * math.prod(block.shape) * WORD_BITS // 8
        may_change += size if at in traced else 0
        if not is_known:
            guessed[link.name] = guessed.get(link.name, 0) + size
    ledger = current_ledger()
    if ledger is not None and ledger.guessed is not None:
        ledger.guessed += may_change
    elif sum(guessed.values()) > MUCH:
        _say_how_much(run, guessed)
    return tuple(tuple(words.get((j, link.name)) for link in block.chain) for j, block in enumerate(run.blocks))


def in_full_words(run: Run, inputs: Inputs) -> Run:
    """The run with segments of the length that takes the fewest words, where decays are known.

    A program keeps as many words of each segment as any may have, and 256 steps at momentum 0.9 fill 2.4 of three.
    """
    if list(traced_decays(run, inputs.h)):
        return run  # whoever is told of too few words and gives more must find the same segments
    sizes: Counter[tuple[Any, Lost]] = Counter()
    for block, link, lost, size in decaying(run, inputs, None):
        sizes[block.buffer(link), lost] += size

    def words(every: int) -> tuple[int, bool]:
        own = dataclasses.replace(run, every=every)
        each = sum(words_of(own, buffer, lost) * size for (buffer, lost), size in sizes.items())
        return -(-run.steps // every) * each, run.steps % every > 0

    lengths = range(max(1, cuts.STORED // 2), min(2 * cuts.STORED, run.steps) + 1)
    return dataclasses.replace(run, every=min(lengths, key=words)) if len(lengths) > 1 else run


def decaying(run: Run, inputs: Inputs, capacity: Given) -> Iterator[tuple[Block, Link, Lost, int]]:
    """(block, link, what is lost of each value, how many values one device has)"""
    for block, values, own in zip(run.blocks, inputs.values, inputs.h, strict=True):
        for link in block.chain:
            if link.decay:
                yield block, link, lost_of(run, block, link, own, capacity)[0], entries_here(values[link.name])


def words_given(link: Link, capacity: Given) -> int | None:
    return dict(capacity).get(link.name) if isinstance(capacity, tuple) else capacity


def lost_of(run: Run, block: Block, link: Link, h: Hypers, capacity: Given) -> tuple[Lost, bool]:
    """What a decay loses, and whether that is known: else it is a guess, until somebody tells."""
    if (words := words_given(link, capacity)) is not None:
        bits = words * PUBLIC_WORD_BITS
        return Lost(bits // WORD_BITS, bits / run.steps), True
    at = block.chain.index(link)
    if (known := block.known[at]) is not None:
        return known, True
    if at_hand(h):
        return lost_by(block.buffer(link), np.asarray(link_numerators(link, h, run.steps)), link), True
    ledger, most = current_ledger(), block.most[at]
    told = ledger.capacity * PUBLIC_WORD_BITS // WORD_BITS if ledger is not None else 0
    fitted = dict(ledger.room).get(link.name) if ledger is not None else None
    guess = math.ceil(run.steps * link.bits_a_step / WORD_BITS), link.bits_a_step
    lost = Lost(*(guess if fitted is None else fitted))
    # The last steps alone may lose all of it; of segments, each its share.
    steps = run.longest if run.store is None and not run.segments else run.steps
    lost = Lost(max(lost.words, told), max(lost.bits, told * WORD_BITS / steps))
    return (most, True) if most is not None and most.words <= lost.words else (lost, fitted is not None)


def as_of_now(run: Run, inputs: Inputs) -> Run:
    """The run whose decays, known in `inputs`, lose what they lose now when it is traced, too."""
    blocks = []
    with own_settings():
        for block, own in zip(run.blocks, inputs.h, strict=True):
            lost = [lost_of(run, block, link, own, None)[0] if link.decay else None for link in block.chain]
            blocks.append(dataclasses.replace(block, known=tuple(lost)))
    return dataclasses.replace(run, blocks=tuple(blocks))


def traced_decays(run: Run, h: list[Hypers]) -> Iterator[tuple[int, Link]]:
    """Of links, with the numbers of their blocks."""
    for j, (block, own) in enumerate(zip(run.blocks, h, strict=True)):
        for link, known in zip(block.chain, block.known, strict=True):
            if link.decay and known is None and not at_hand(own):
                yield j, link


def words_of(run: Run, buffer: Buffer, lost: Lost) -> int:
    """Of the longest segment."""
    whole = run.longest == run.steps
    return lost.words if whole else min(lost.words, buffer.most_words(run.longest, lost.bits))


def _check_names(run: Run, capacity: Given) -> None:
    links = {link.name: None for block in run.blocks for link in block.chain if link.decay}
    for name, _ in capacity if isinstance(capacity, tuple) else ():
        if name not in links:
            raise ValueError(
                f"`capacity` names {name!r}, and no link that loses digits is called that: there are {', '.join(links)}."
            )


def _say_how_much(run: Run, guessed: dict[str, int]) -> None:
    names = ", ".join(f"{name!r}: ..." for name in guessed)
    parts = ", ".join(f"{size / 2**30:.1f} GiB for `{name}`" for name, size in guessed.items())
    warnings.warn(
        f"decays are traced, so nobody knows yet how many digits {run.steps} steps of them lose. Room for many is set "
        f"aside: {parts}. Decays that are Python numbers take what they lose and no more, those of hg.bounded(x, low, high) "
        f"what `low` would lose. Else pass hg.Reversible(capacity={{{names}}}), in 32-bit words a parameter: steps times "
        "log2(1 / decay) / 32, and one more; too few is an error that says how many the link of most needs. "
        'hg.Reversible(memory_budget="512MiB") keeps states now and then, and digits between two of them alone.',
        stacklevel=2,
    )
