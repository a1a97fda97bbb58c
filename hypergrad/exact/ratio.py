"""Ratios n/d with d a power of two, and exact division by n.

Invariant: `0 <= x - divide(x, n) * n < n`, for every |x| <= 2^62 and 1 <= n <= 2^24.
"""

import jax
import jax.numpy as jnp
from jax import Array


MOMENTUM_DENOMINATOR = 2**16
FINE_DENOMINATOR = 2**24  # for decays like 1 - learning_rate * weight_decay, which round to 1 on 2^16


def substitute(x: Array, value: Array) -> Array:
    """`value`, with the derivative of `x`, any number of times: finite float [...], float [...] -> float [...].

    x - x is exactly zero. A custom derivative rule says it more directly, but JAX drops such rules inside a scan when it is
    reversed, so that the second derivative would be wrong.
    """
    return jax.lax.stop_gradient(value) + (x - jax.lax.stop_gradient(x))


def to_ratio(rho: Array, denominator: int, may_be_one: bool = False) -> Array:
    """n/d with n = round(rho d), as a float; d(n/d)/d(rho) = 1. A rho that no 1 <= n < d (or n = d) stands for stays as it
    is: the caller reports it.

    float [...] -> float [...] of the same dtype, exact: n has at most 24 bits. What is used in the decay, in the
    increments and in the derivative is always this value, never the unrounded one.
    """
    n = jnp.round(rho * denominator)
    representable = (n >= 1) & (n <= (denominator if may_be_one else denominator - 1))
    return substitute(rho, jnp.where(representable, n / denominator, rho))


def numerator(ratio: Array, denominator: int) -> Array:
    """n of an n/d that `to_ratio` made: float [...] -> int64 [...]. Out of range is clipped to [1, d], and reported
    by the caller, so that division stays defined."""
    return jnp.clip(jnp.nan_to_num(jnp.round(ratio * denominator)), 1, denominator).astype(jnp.int64)


def divide(x: Array, n: Array) -> Array:
    """x div n, floor division: int64 [...], int64 [] or [...] -> int64 [...].

    64-bit integer division is not vectorized by processors; two multiplications by 1/n in float64 are, and are exact:
    1. The first quotient is off by at most 2^62/n * 2^-51 + 1/2, so what it leaves is below 2^11 + n in magnitude.
    2. (rest + 1/2) / n lies at least 2^-25 from any integer, and its rounding error is below 2^-38: its floor is right.
    """
    inverse = 1.0 / n.astype(jnp.float64)
    guess = jnp.round(x.astype(jnp.float64) * inverse).astype(jnp.int64)
    rest = x - guess * n
    return guess + jnp.floor((rest.astype(jnp.float64) + 0.5) * inverse).astype(jnp.int64)


def divide_small(x: Array, n: Array) -> Array:
    """`divide` for 0 <= x < 2^48, in one step: its rounding error is below 2^-52 * 2^48/n, and 1/(2n) would be too much."""
    return jnp.floor((x.astype(jnp.float64) + 0.5) * (1.0 / n.astype(jnp.float64))).astype(jnp.int64)
