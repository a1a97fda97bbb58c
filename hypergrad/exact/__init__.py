"""Integers: the grid, exactly reversible multiplication by n/d, information buffers. Knows no loss and no optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

from hypergrad.exact import buffer as _device
from hypergrad.exact import deferred as _deferred
from hypergrad.exact import gmpy as _gmpy
from hypergrad.exact.buffer import HEAD_BITS as HEAD_BITS
from hypergrad.exact.buffer import PUBLIC_WORD_BITS as PUBLIC_WORD_BITS
from hypergrad.exact.buffer import WORD_BITS as WORD_BITS
from hypergrad.exact.buffer import Buffer as Buffer
from hypergrad.exact.buffer import Schedule as Schedule
from hypergrad.exact.buffer import Turn as Turn
from hypergrad.exact.buffer import behind_branch as behind_branch
from hypergrad.exact.buffer import schedule as schedule
from hypergrad.exact.buffer import unseen as unseen
from hypergrad.exact.buffer import words_needed as words_needed
from hypergrad.exact.deferred import Deferral as Deferral
from hypergrad.exact.deferred import Words as Words
from hypergrad.exact.grid import add as add
from hypergrad.exact.grid import decode as decode
from hypergrad.exact.grid import default_fraction_bits as default_fraction_bits
from hypergrad.exact.grid import encode as encode
from hypergrad.exact.grid import grid_range as grid_range
from hypergrad.exact.grid import subtract as subtract
from hypergrad.exact.grid import widen as widen
from hypergrad.exact.limbs import LOW_BITS as LOW_BITS
from hypergrad.exact.limbs import WIDE_DENOMINATOR as WIDE_DENOMINATOR
from hypergrad.exact.limbs import Scaled as Scaled
from hypergrad.exact.limbs import Value as Value
from hypergrad.exact.limbs import Wide as Wide
from hypergrad.exact.limbs import all_of as all_of
from hypergrad.exact.limbs import same as same
from hypergrad.exact.lost import STEPS as STEPS
from hypergrad.exact.lost import Lost as Lost
from hypergrad.exact.lost import first_lost as first_lost
from hypergrad.exact.ratio import FINE_DENOMINATOR as FINE_DENOMINATOR
from hypergrad.exact.ratio import MOMENTUM_DENOMINATOR as MOMENTUM_DENOMINATOR
from hypergrad.exact.ratio import SMALLEST_RATIO as SMALLEST_RATIO
from hypergrad.exact.ratio import divide as divide
from hypergrad.exact.ratio import known_numerator as known_numerator
from hypergrad.exact.ratio import numerator as numerator
from hypergrad.exact.ratio import substitute as substitute
from hypergrad.exact.ratio import to_ratio as to_ratio


class InformationBuffer(NamedTuple):
    """An information buffer: where the digits go that a multiplication by n/d would lose."""

    empty: Callable[[tuple[int, ...], int | None], Any]  # (shape, capacity) -> buffer
    multiply_by: Callable[..., tuple[Any, Any]]  # (buffer, c, n, denominator, turn) -> (buffer, c)
    divide_by: Callable[..., tuple[Any, Any]]  # the inverse, same arguments
    is_empty: Callable[[Any], Any]  # buffer -> bool, the shape of what it belongs to
    length: Callable[[Any, Any], Any]  # (buffer, words spilled) -> bits of its integers, their mean
    hold: Callable[[Value], Value]  # a value of the grid as it is multiplied
    schedule: Callable[[Any, int], Schedule]  # (numerators [steps], denominator)
    words_needed: Callable[[Any, int], int]  # likewise, of concrete numerators: `schedule(..).words`


def _as_it_is(z: Value) -> Value:
    return z


DEVICE = InformationBuffer(
    _device.empty_buffer, _device.multiply_by, _device.divide_by, _device.is_empty, _device.length,
    _as_it_is, _device.schedule, _device.words_needed,
)  # fmt: skip
DEFERRED = InformationBuffer(
    _deferred.empty_words, _deferred.multiply_by, _deferred.divide_by, _deferred.is_empty, _deferred.length,
    _deferred.hold, _deferred.schedule, _deferred.words_needed,
)  # fmt: skip
GMPY2 = InformationBuffer(
    _gmpy.empty_buffer, _gmpy.multiply_by, _gmpy.divide_by, _gmpy.is_empty, _gmpy.length,
    _as_it_is, _device.schedule, _device.words_needed,
)  # fmt: skip
GMPY2_DEFERRED = InformationBuffer(
    _gmpy.empty_buffer, _gmpy.multiply_waiting, _gmpy.divide_waiting, _gmpy.is_empty, _gmpy.length,
    _deferred.hold, _deferred.schedule, _deferred.words_needed,
)  # fmt: skip
