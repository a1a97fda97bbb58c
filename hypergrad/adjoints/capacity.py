"""How many words buffers set aside.

Invariant: a decay that is known loses no more words than are set aside; of others the status says when they did.
"""

import math
import warnings

import numpy as np

from hypergrad._report import current_ledger
from hypergrad.exact import PUBLIC_WORD_BITS, WORD_BITS
from hypergrad.optimizers.block import Block, Lost, lost_by
from hypergrad.optimizers.chain import Link
from hypergrad.optimizers.expand import Hypers, concrete, link_numerators
from hypergrad.run.spec import Run
from hypergrad.run.status import Capacity


MUCH = 2**30  # bytes


def capacities(run: Run, h: list[Hypers], capacity: int | None) -> Capacity:
    """Words of the buffer per parameter to allocate, for each link that decays. capacity: as users give it."""
    guessed: dict[str, int] = {}  # bytes, by link

    def room(block: Block, link: Link, known: Lost | None, h: Hypers) -> int | None:
        if not link.decay:
            return None
        lost, is_known = lost_of(run, block, link, known, h, capacity)
        needed = words_of(run, block, link, lost)
        if not is_known:
            guessed[link.name] = guessed.get(link.name, 0) + needed * math.prod(block.shape) * WORD_BITS // 8
        return needed

    found = tuple(
        tuple(room(block, link, known, hj) for link, known in zip(block.chain, block.known, strict=True))
        for block, hj in zip(run.blocks, h, strict=True)
    )
    if sum(guessed.values()) > MUCH:
        _say_how_much(run, guessed)
    return found


def lost_of(run: Run, block: Block, link: Link, known: Lost | None, h: Hypers, capacity: int | None) -> tuple[Lost, bool]:
    """What a decay loses, and whether that is known: else it is a guess, until somebody tells."""
    if capacity is not None:
        bits = capacity * PUBLIC_WORD_BITS
        return Lost(bits // WORD_BITS, bits / run.steps), True
    if known is not None:
        return known, True
    if concrete(h):
        return lost_by(block.buffer(link), np.asarray(link_numerators(link, h, run.steps)), link), True
    told = ledger.capacity * PUBLIC_WORD_BITS // WORD_BITS if (ledger := current_ledger()) else 0
    words = max(math.ceil(run.steps * link.bits_a_step / WORD_BITS), told)
    return Lost(words, max(link.bits_a_step, told * WORD_BITS / run.steps)), False


def words_of(run: Run, block: Block, link: Link, lost: Lost) -> int:
    """Of the longest segment."""
    whole = run.longest == run.steps
    return lost.words if whole else min(lost.words, block.buffer(link).most_words(run.longest, lost.bits))


def _say_how_much(run: Run, guessed: dict[str, int]) -> None:
    parts = ", ".join(f"{size / 2**30:.1f} GiB for `{name}`" for name, size in guessed.items())
    warnings.warn(
        f"decays are traced, so nobody knows yet how many digits {run.steps} steps of them lose. Room for many is set "
        f"aside: {parts}. Decays that are Python numbers take what they lose and no more. Else pass "
        "hg.Reversible(capacity=...), in 32-bit words a parameter, by what `Trained.buffer_words` of a shorter run says, in "
        'proportion to the steps; too few is an error that says how many. hg.Reversible(memory_budget="512MiB") keeps '
        "states now and then, and digits between two of them alone.",
        stacklevel=2,
    )
