"""Ratios n/d with d a power of two, and exact division by n.

Invariant: `q, r = divide(x, n)` makes `x == q n + r` and `0 <= r < n`, for every 1 <= n <= 2^24 and |x| <= 2^50 n.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


MOMENTUM_DENOMINATOR = 2**16
FINE_DENOMINATOR = 2**24  # for decays like 1 - learning_rate * weight_decay, which round to 1 on 2^16
SMALLEST_RATIO = 2.0**-16  # it loses a whole word of the buffer in one step


def substitute(x: Array, value: Array) -> Array:
    """`value`, with the derivative of `x`, any number of times: finite float [...], float [...] -> float [...].

    x - x is exactly zero. A custom derivative rule says it more directly, but JAX drops such rules inside a scan when it is
    reversed, so that the second derivative would be wrong.
    """
    return jax.lax.stop_gradient(value) + (x - jax.lax.stop_gradient(x))


@functools.partial(jax.jit, static_argnames=("denominator", "may_be_one"))
def to_ratio(rho: Array, denominator: int, may_be_one: bool = False) -> Array:
    """n/d with n = round(rho d), as a float; d(n/d)/d(rho) = 1. A rho that no n < d (or n = d) stands for, or
    that is below 2^-16, stays as it is: the caller reports it.

    float [...] -> float [...] of the same dtype, exact: n has at most 24 bits. What is used in the decay, in the
    increments and in the derivative is always this value, never the unrounded one.
    """
    n = jnp.round(rho * denominator)
    representable = (n >= smallest_numerator(denominator)) & (n <= (denominator if may_be_one else denominator - 1))
    return substitute(rho, jnp.where(representable, n / denominator, rho))


@functools.partial(jax.jit, static_argnames="denominator")
def kept_on_average(lost: Array, denominator: int) -> Array:
    """1 - lost as n/d, where what rounding leaves of a step goes to the next: sums over steps are off by half of 1/d,
    however little is lost at each; d(n/d)/d(lost) = -1. What no n stands for stays 1 - lost, as in `to_ratio`.

    float [steps, ...] -> the same, exact. Fractions are added up in 32 bits, without JAX's 64: a sum that overflows is less
    than what was added.
    """
    quanta = lost * denominator
    whole = jnp.floor(quanta)
    fraction = ((quanta - whole) * 2.0**32).astype(jnp.uint32)
    sums = jnp.uint32(2**31) + jnp.cumsum(fraction, axis=0, dtype=jnp.uint32)
    n = denominator - whole - (sums < fraction).astype(lost.dtype)
    representable = (lost >= 0) & (n >= smallest_numerator(denominator))
    above_one = jnp.maximum(1 - lost, 1 + 2 / denominator)  # that no n stands for, where 1 - lost rounds to 1
    return substitute(1 - lost, jnp.where(representable, n / denominator, jnp.where(lost < 0, above_one, 1 - lost)))


@functools.partial(jax.jit, static_argnames="denominator")
def numerator(ratio: Array, denominator: int) -> Array:
    """n of an n/d that `to_ratio` made: float [...] -> int64 [...]. Out of range is clipped, and reported by
    the caller, so that division stays defined."""
    n = jnp.round(ratio * denominator).astype(jnp.int64)  # of NaN: some integer
    return jax.lax.clamp(jnp.int64(smallest_numerator(denominator)), n, jnp.int64(denominator))


def known_numerator(rho: np.ndarray, denominator: int) -> np.ndarray:
    """`numerator(to_ratio(rho, ..))` of numbers at hand, without a program: float [...], not infinite -> int64 [...]."""
    n = np.nan_to_num(np.round(rho * rho.dtype.type(denominator)))
    return np.clip(n, smallest_numerator(denominator), denominator).astype(np.int64)


def smallest_numerator(denominator: int) -> int:
    return max(1, int(denominator * SMALLEST_RATIO))


def divide(x: Array, n: Array) -> tuple[Array, Array]:
    """(x div n, x mod n), floor division: int64 [...], int64 [] or [...] -> int64 [...] twice. Exact for |x| <= 2^50 n.

    64-bit integer division is not vectorized by processors; a multiplication by 1/n in float64 is. Its relative error is
    below 3 * 2^-53, so the product is off by less than 3/8, and the nearest integer is the quotient or one more.
    """
    quotient = nearest(x.astype(jnp.float64) * (1.0 / n.astype(jnp.float64)))
    rest = x - quotient * n
    above = rest < 0
    return jnp.where(above, quotient - 1, quotient), jnp.where(above, rest + n, rest)


def nearest(x: Array) -> Array:
    """The nearest integer, read from the last bits of x + 3 * 2^51: float64 [...] -> int64 [...], |x| < 2^51.

    XLA's conversion asks for NaN and both ends of the range, which takes three times as long.
    """
    offset = 3 * 2.0**51
    as_integer = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int64)
    return as_integer(x + offset) - as_integer(jnp.float64(offset))
