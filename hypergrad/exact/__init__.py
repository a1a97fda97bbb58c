"""Integers: the grid, exactly reversible multiplication by n/d, information buffers. Knows no loss and no optimizer."""

from hypergrad.exact.buffers import HEAD_BITS as HEAD_BITS
from hypergrad.exact.buffers import PUBLIC_WORD_BITS as PUBLIC_WORD_BITS
from hypergrad.exact.buffers import WORD_BITS as WORD_BITS
from hypergrad.exact.buffers import Buffer as Buffer
from hypergrad.exact.buffers import Mark as Mark
from hypergrad.exact.buffers import Schedule as Schedule
from hypergrad.exact.deferred import Deferred as Deferred
from hypergrad.exact.deferred import DeferredEntry as DeferredEntry
from hypergrad.exact.deferred import Words as Words
from hypergrad.exact.fixed import LOW_BITS as LOW_BITS
from hypergrad.exact.fixed import STEPS as STEPS
from hypergrad.exact.fixed import WIDE_DENOMINATOR as WIDE_DENOMINATOR
from hypergrad.exact.fixed import Fixed as Fixed
from hypergrad.exact.fixed import Overflow as Overflow
from hypergrad.exact.fixed import all_of as all_of
from hypergrad.exact.fixed import default_fraction_bits as default_fraction_bits
from hypergrad.exact.fixed import encode as encode
from hypergrad.exact.fixed import grid_range as grid_range
from hypergrad.exact.heads import Heads as Heads
from hypergrad.exact.heads import HeadsAndWords as HeadsAndWords
from hypergrad.exact.heads import SpillEntry as SpillEntry
from hypergrad.exact.ratio import FINE_DENOMINATOR as FINE_DENOMINATOR
from hypergrad.exact.ratio import MOMENTUM_DENOMINATOR as MOMENTUM_DENOMINATOR
from hypergrad.exact.ratio import SMALLEST_RATIO as SMALLEST_RATIO
from hypergrad.exact.ratio import divide as divide
from hypergrad.exact.ratio import kept_on_average as kept_on_average
from hypergrad.exact.ratio import known_numerator as known_numerator
from hypergrad.exact.ratio import nearest as nearest
from hypergrad.exact.ratio import numerator as numerator
from hypergrad.exact.ratio import smallest_numerator as smallest_numerator
from hypergrad.exact.ratio import substitute as substitute
from hypergrad.exact.ratio import to_ratio as to_ratio
from hypergrad.exact.reference import Digits as Digits
from hypergrad.exact.reference import Reference as Reference
from hypergrad.exact.sums import SUM_BITS as SUM_BITS
from hypergrad.exact.sums import TERMS as TERMS
from hypergrad.exact.sums import Offsets as Offsets
from hypergrad.exact.sums import Sum as Sum
from hypergrad.exact.sums import exponent_of as exponent_of
from hypergrad.exact.sums import power_of_two as power_of_two
from hypergrad.exact.sums import sum_range as sum_range
from hypergrad.exact.sums import total as total


HEADS, DEFERRED = HeadsAndWords(), Deferred()
REFERENCE, DEFERRED_REFERENCE = Reference(), Reference(deferred=True)
