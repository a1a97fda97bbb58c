"""Fingerprints of what a step saw: numbers by which two passes are compared, step by step, without keeping what they saw.

Invariant: equal bits have equal prints, in every pass; others have another one, but for one case in 2^64.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad.run.spec import Run
from hypergrad.run.step import State


def state_prints(run: Run, state: State) -> Array:
    """Of every place: uint64 [places]."""
    rows = []
    for block, slots in zip(run.blocks, state, strict=True):
        for link in block.chain:
            high, low, _ = slots[link.name].value
            limbs = [block.split(x) for x in (high, low) if x is not None]
            rows += [print_of(leaf) for leaf in zip(*limbs, strict=True)]
    return jnp.stack(rows)


def print_of(tree: Any) -> Array:
    """A position-dependent checksum of the bits of all arrays: uint64 []."""
    total = jnp.uint64(0)
    for place, x in enumerate(jax.tree.leaves(tree)):
        total += _print(x) * jnp.uint64(2 * place + 1)
    return total


def _print(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or (jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8):
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).reshape(-1).astype(jnp.uint64)
    weights = jnp.arange(bits.size, dtype=jnp.uint64) * jnp.uint64(0x9E3779B97F4A7C15) | jnp.uint64(1)
    return jnp.sum(bits * weights)
