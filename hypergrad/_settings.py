"""The settings of JAX under which the library computes, whatever the caller's are.

Invariant: no setting outlives its `with`; the user's own functions are traced before, under the user's.
"""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """64-bit integers, JAX's standard promotion of dtypes and ranks, and compiled programs, where the caller has none."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.disable_jit(False),
    ):
        yield
