"""Numbers of the fixed-point grid: a float x is held as integers, trunc(x * 2^fraction_bits) in the simplest case.

Invariants: `encode(-x) == -encode(x)`. `x.add(y, ..).subtract(y, ..)` is x again, bit for bit, wherever the sum is below
`grid_range` in magnitude (then no int64 can wrap). `x.split(k)` and `join`, `x.times(n, digit)` and `over` are inverse.

A decay by n/d puts a digit of up to d quanta into a value, and a deferred one makes quanta coarser by as much. For a mean of
squares that is too much: g^2 has twice the decades of g. A second limb moves these quanta 46 bits down.

A sum that leaves the range is replaced by a record of when it did, and the record stays to the end of the run. So no step
looks at all values, which would be to read every array once more: `first_record` of the last state is the first of the
whole run. A record is an integer above all values, the greater the earlier the step, with the bits of the magnitude below:

    (2^31 - 2 - step) 2^32 + the bits of the magnitude as a float32
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.exact.ratio import divide, nearest


RANGE_BITS = 62
LOW_BITS = 46  # even, to be divided by halves; a low limb times d must stay below 2^63
WIDE_DENOMINATOR = 2**16  # the largest d for values of two limbs
STEPS = 2**29 - 2  # that an overflow record can tell apart
_LEAST_RECORD = 3 * 2**61  # no value that passes as in range comes near it
_DEFAULT_FRACTION_BITS = {8: 52, 4: 48, 2: 48}  # by bytes per float; 2: float16 and bfloat16


class Overflow(NamedTuple):
    """Which value left its range first, and when."""

    step: Array  # int32; -1: before the first step; `STEPS`: none did
    magnitude: Array  # float32, of the value; NaN or infinite if it was
    entry: Array  # int32, its place among all of them

    @staticmethod
    def of(record: Array, entry: Array) -> "Overflow":
        """What `Fixed.first_record` found: int64 [...], int32 [...]."""
        step = jnp.where(record < _LEAST_RECORD, STEPS, 2**31 - 2 - (record >> 32)).astype(jnp.int32)
        return Overflow(step, jax.lax.bitcast_convert_type(record.astype(jnp.uint32), jnp.float32), entry)


class Fixed(NamedTuple):
    """The number (high + low 2^-46) scale, in quanta of 2^-fraction_bits.

    |high scale| < 2^62, and 0 <= low < 2^46 of two limbs, `wide`. What is not there counts as 0 and 1.
    """

    high: Array  # int64 [...]
    low: Array | None = None  # int64 [...]
    scale: Array | None = None  # float64 [2]: that of deferred decays, which all entries share, and its inverse

    @property
    def shape(self) -> tuple[int, ...]:
        return self.high.shape

    @staticmethod
    def zeros_like(x: Array, wide: bool) -> "Fixed":
        """Zeros of the shape, and the sharding, of x."""
        zeros = lambda: jnp.zeros_like(x, dtype=jnp.int64)  # noqa: E731
        return Fixed(zeros(), zeros() if wide else None)

    def decode(self, fraction_bits: int, dtype: np.dtype) -> Array:
        """float [...], rounded to float64 and from there to `dtype`.

        Scaled in float64 because XLA's CPU kernels for sums and maxima pull a last multiplication in, constant and all.
        """
        unit: Any = 2.0**-fraction_bits
        if self.scale is not None:
            unit = self.scale[0] * unit
        x = self.high.astype(jnp.float64)
        if self.low is not None:
            x = x + self.low.astype(jnp.float64) * 2.0**-LOW_BITS
        return (x * unit).astype(dtype)

    def add(self, increment: Array, fraction_bits: int, step: Any = -1, old: "Fixed | None" = None) -> "Fixed":
        """self + trunc(increment * 2^fraction_bits): float [...].

        Where that is out of range, or no number, a record of it; step: int32 [], -1 for before the first. Where `old`, the
        value before its decay, is a record, that. With a second limb, which has 46 bits more, or a scale, whose quanta are
        coarser, the nearest is added.
        """
        # The increment is compared here, and not added as a float: XLA would make one expression of the sum, the increment
        # and the gradient it is made of, and round it otherwise than on the way back.
        limit = grid_range(fraction_bits)
        total = self._plus(*self._quanta(increment, fraction_bits), old)
        update = jnp.abs(increment).astype(_at_least_float32(increment.dtype))
        magnitude = jnp.where(update < limit, total._magnitude(fraction_bits), update.astype(jnp.float32))
        in_range, record = (update < limit) & total._in_range(), overflow_record(step, magnitude)
        if old is not None:  # a choice of the old value would be a masked store, which takes some processors long
            in_range, record = in_range & (old.high < _LEAST_RECORD), jnp.maximum(record, old.high)
        return total._replace(high=jnp.where(in_range, total.high, record))

    def subtract(self, increment: Array, fraction_bits: int) -> "Fixed":
        """The inverse of `add` wherever the sum is in range."""
        return self._minus(*self._quanta(increment, fraction_bits))

    def _in_range(self) -> Array:
        """Whether |high scale| < 2^62: bool [...]. Integers are compared, since without AVX-512 every int64 is converted by
        itself: decoded values were a tenth of an update."""
        if self.scale is None:
            limit: Any = 2**RANGE_BITS
        else:
            limit = (self.scale[1] * 2.0**RANGE_BITS).astype(jnp.int64)
        return (-limit < self.high) & (self.high < limit)

    def _magnitude(self, fraction_bits: int) -> Array:
        """float32 [...], of the upper 32 bits alone: for records, right to 2^-30, or to 2^-14 at the largest scale."""
        unit: Any = 2.0 ** (32 - fraction_bits)
        if self.scale is not None:
            unit = (self.scale[0] * unit).astype(jnp.float32)
        return jnp.abs((self.high >> 32).astype(jnp.int32).astype(jnp.float32)) * unit

    def _plus(self, high: Array, low: Array | None, old: "Fixed | None" = None) -> "Fixed":
        """self + high + low 2^-46, for a low of any size and sign; where `old` is a record, a low limb of 0.

        The low limb first, and the carry from the new one: floor((self.low + low) / 2^46) = -floor((new - low) / 2^46).
        """
        if self.low is None or low is None:
            return self._replace(high=self.high + high)
        # So each limb can be written where it was. With a carry from the old one XLA:CPU copied a limb at every step, and
        # made the low one again for each kernel that reads it: a choice between two arrays is stored.
        new = (self.low + low) & (2**LOW_BITS - 1)
        if old is not None and old.low is not None:
            new = jnp.where(old.high < _LEAST_RECORD, new, 0)
        return self._replace(high=self.high + high - ((new - low) >> LOW_BITS), low=new)

    def _minus(self, high: Array, low: Array | None) -> "Fixed":
        """The inverse of `_plus`."""
        if self.low is None or low is None:
            return self._replace(high=self.high - high)
        return self._carried(self.high - high, self.low - low)

    def _carried(self, high: Array, low: Array) -> "Fixed":
        """high + low 2^-46, for a low of any size and sign."""
        return self._replace(high=high + (low >> LOW_BITS), low=low & (2**LOW_BITS - 1))

    def _quanta(self, increment: Array, fraction_bits: int) -> tuple[Array, Array | None]:
        """What the increment is to the limbs: int64 [...] each, of which the low one may have any sign."""
        if self.low is None and self.scale is None:
            return encode(increment, fraction_bits), None
        per_unit: Any = 2.0**fraction_bits if self.scale is None else self.scale[1] * 2.0**fraction_bits
        if self.low is None:
            return jnp.round(increment * per_unit).astype(jnp.int64), None
        # Rounded once, to 2^-(fraction_bits + 46). All else is exact, whatever a compiler contracts.
        quanta = jnp.round(increment.astype(jnp.float64) * (per_unit * 2.0**LOW_BITS))
        whole = jnp.floor(quanta * 2.0**-LOW_BITS)
        return whole.astype(jnp.int64), nearest(quanta - whole * 2.0**LOW_BITS)

    def split(self, k: int) -> tuple["Fixed", Array]:
        """(self div 2^k, self mod 2^k) in quanta of the last limb; k <= 16 if there are two."""
        if self.low is None:
            return self._replace(high=self.high >> k), self.high & (2**k - 1)
        high, carried = self.high >> k, (self.high & (2**k - 1)) << (LOW_BITS - k)
        return self._replace(high=high, low=carried | (self.low >> k)), self.low & (2**k - 1)

    def join(self, digit: Array, k: int) -> "Fixed":
        """self 2^k + digit, 0 <= digit < 2^k: the inverse of `split`; and of `split_nearest`, of what that gave."""
        if self.low is None:
            return self._replace(high=(self.high << k) + digit)
        return self._carried(self.high << k, (self.low << k) | digit)

    def split_nearest(self, k: int) -> tuple["Fixed", Array]:
        """(q, r) with self = q 2^k + r and -2^(k-1) <= r < 2^(k-1): by `split` what falls to nothing would stop at -1.

        Of two limbs `split`, since a quantum of the low one is nothing to anybody.
        """
        quotient, digit = (self if self.low is not None else self._replace(high=self.high + 2 ** (k - 1))).split(k)
        return quotient, digit if self.low is not None else digit - 2 ** (k - 1)

    def near(self, digit: Any, n: Any) -> Any:
        """What a digit of such a value, 0 <= digit < n, stands for: -(n div 2) <= . < n - n div 2; of two limbs itself."""
        return digit if self.low is not None else jnp.where(digit < n - (n >> 1), digit, digit - n)

    def times(self, n: Array, digit: Array) -> "Fixed":
        """self n + digit, |digit| < n."""
        if self.low is None:
            return self._replace(high=self.high * n + digit)
        return self._carried(self.high * n, self.low * n + digit)

    def over(self, n: Array, apart: Callable[..., Array]) -> tuple["Fixed", Array]:
        """(self div n, self mod n) of what `times` made of a digit that is `near`: its inverse. apart(function, *arguments)
        stores what it computes: XLA would rather divide again for each array made from a quotient."""
        if self.low is None:
            half = n >> 1
            quotient, digit = divide(self.high + half, n)
            return self._replace(high=quotient), jnp.where(digit < half, digit + n, digit) - half
        low = apart(_low_quotient, self.high, self.low, n)
        digit = (self.low - low * n) & (2**LOW_BITS - 1)
        return self._replace(high=divide(self.high, n)[0], low=low), digit

    def where(self, taken: Array, other: "Fixed") -> "Fixed":
        """The integers of self where `taken`: bool [] or [...], and else those of `other`."""
        high, low = jax.tree.map(lambda x, y: jnp.where(taken, x, y), self[:2], other[:2])
        return self._replace(high=high, low=low)

    def equals(self, other: "Fixed") -> Array:
        """Whether the integers are the same, entry by entry: bool [...]."""
        high = self.high == other.high
        return high if self.low is None else high & (self.low == other.low)

    @jax.jit
    def first_record(self) -> tuple[Array, Array]:
        """(value, index) of the first that left its range, of those that left together the one of the lowest index; of some
        value if none did, as `Overflow.of` tells: int64 [], int32 []."""
        z = self.high.reshape(-1)
        if not z.size:
            return jnp.int64(0), jnp.int32(0)
        index = jax.lax.argmax((z >> 32).astype(jnp.int32), 0, jnp.int32)  # in 32 bits: it is lowered outside of x64
        if jax.device_count() > 1:  # of what is divided, each device would get all to look one up
            return jnp.max(jnp.where(jnp.arange(z.size, dtype=jnp.int32) == index, z, -_LEAST_RECORD)), index
        return z[index], index


def default_fraction_bits(dtype: np.dtype) -> int:
    """Fraction bits of a parameter's grid: 52 for float64 (range +-1024), 48 below (range +-16384)."""
    return _DEFAULT_FRACTION_BITS[np.dtype(dtype).itemsize]


def grid_range(fraction_bits: int) -> float:
    """The magnitude that a value on the grid must stay below."""
    return 2.0 ** (RANGE_BITS - fraction_bits)


def encode(x: Array, fraction_bits: int) -> Array:
    """trunc(x * 2^fraction_bits), toward zero so that both signs round alike: float [...] -> int64 [...].

    Call it inside `jax.enable_x64(True)`. The scaling is exact, so the only rounding is the truncation.
    """
    return (x.astype(_at_least_float32(x.dtype)) * 2.0**fraction_bits).astype(jnp.int64)


def overflow_record(step: Any, magnitude: Array) -> Array:
    """int32 [], -1 for before the first step; float32 [...], not negative -> int64 [...]."""
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.uint32).astype(jnp.int64)
    return ((2**31 - 2 - jnp.asarray(step, jnp.int64)) << 32) + bits


def _low_quotient(high: Array, low: Array, n: Array) -> Array:
    """By long division, half a limb at a time."""
    half = LOW_BITS // 2
    upper, rest = divide((divide(high, n)[1] << half) | (low >> half), n)
    lower, _ = divide((rest << half) | (low & (2**half - 1)), n)
    return (upper << half) | lower


def all_of(flags: Array) -> Array:
    """`flags.all()`, as a maximum of floats: of a reduction of bools XLA:CPU makes three kernels. bool [...] -> bool []."""
    return jnp.max((~flags).astype(jnp.float32).reshape(-1), initial=0) == 0


def _at_least_float32(dtype: Any) -> Any:
    return jnp.float32 if jax.dtypes.finfo(dtype).bits < 32 else dtype
