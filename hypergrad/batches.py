"""Sources of batches: pure functions `t -> batch`, so that the reverse pass sees at step t what the forward pass saw.

Invariant: `source(t)` depends on t and on the leaves of `source`, on nothing else.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._integers import as_int
from hypergrad._numbers import check_number
from hypergrad._programs import owned
from hypergrad.errors import ReversalError


_SHUFFLE_ROUNDS = 32


class FullBatch(eqx.Module):
    """Made by `hg.full_batch`."""

    data: Any

    def __call__(self, t: Array) -> Any:
        del t
        return self.data


class Stacked(eqx.Module):
    """Made by `hg.stacked`."""

    arrays: Any

    @property
    def steps(self) -> int:
        return jax.tree.leaves(self.arrays)[0].shape[0]

    def __call__(self, t: Array) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, t, 0, keepdims=False), self.arrays)


class Minibatches(eqx.Module):
    """Made by `hg.minibatches`."""

    data: Any
    key: Array
    batch_size: int = eqx.field(static=True)
    replacement: bool = eqx.field(static=True)

    def __call__(self, t: Array) -> Any:
        indices = self.indices(t)
        return jax.tree.map(lambda x: x[indices], self.data)

    def indices(self, t: Array) -> Array:
        """int32 [batch_size]: the rows of step t."""
        size = jax.tree.leaves(self.data)[0].shape[0]
        if self.replacement:
            return jax.random.randint(jax.random.fold_in(self.key, t), (self.batch_size,), 0, size, jnp.int32)
        # Position in the endless stream of passes; a batch may end one pass and begin the next. The first
        # `size` steps are exactly `batch_size` passes, which keeps the products below 2^31 for any t.
        cycle, t = t // size, t % size
        position = t * self.batch_size + jnp.arange(self.batch_size, dtype=jnp.int32)
        epoch = cycle * self.batch_size + position // size
        return _shuffled(self.key, epoch.astype(jnp.uint32), position % size, size)


class HostBatches:
    """Made by `hg.host_batches`: of one structure, and the same each time that step t is asked for."""

    def __init__(self, load: Callable[[int], Any], steps: int | None) -> None:
        self.load, self.steps = load, steps
        self.prints: dict[int, int] = {}  # of all batches seen, by step
        try:
            with jax.ensure_compile_time_eval():  # what it does in JAX is loading too, wherever this is called
                first = load(0)
        except (IndexError, StopIteration) as e:
            raise ValueError(
                f"hg.host_batches has no batch for step 0 ({type(e).__name__}: {e}): the source is empty, an iterator that "
                "has run out, or a function that fails. Pass a function of the step, or a list."
            ) from e
        self.first = jax.tree.map(lambda x: jnp.array(_known(x), copy=True), first)
        self.like = [(path, x.shape, x.dtype) for path, x in jax.tree_util.tree_leaves_with_path(self.first)]

    def __call__(self, t: int) -> Any:
        return self.load(t)

    def leaves(self, t: int, steps: int) -> list[Array]:
        """The leaves of step t's batch, on the device."""
        try:
            batch = self.load(t)
        except (IndexError, StopIteration) as e:
            raise ValueError(
                f"`batches` ended early: hg.host_batches has no batch for step {t} of {steps}. Pass fewer `steps`, or a "
                "source that goes on."
            ) from e
        tree: Any = jax.tree.structure(batch)
        if tree != jax.tree.structure(self.first):
            raise ValueError(
                f"`batches` changes its structure: at step {t} hg.host_batches has {tree}, at step 0 "
                f"{jax.tree.structure(self.first)}. All steps run one program; pad what varies."
            )
        found = [_known(x) for x in jax.tree.leaves(batch)]
        for x, (path, shape, dtype) in zip(found, self.like, strict=True):
            if x.shape != shape or not np.can_cast(x.dtype, dtype, "same_kind"):
                raise ValueError(
                    f"`batches` changes its shapes: at step {t} batch{jax.tree_util.keystr(path)} of hg.host_batches is "
                    f"{x.dtype}{list(x.shape)}, at step 0 {dtype}{list(shape)}. All steps run one program; drop or pad a "
                    "last batch that is smaller."
                )
        self._remember(t, functools.reduce(lambda crc, x: zlib.crc32(_bytes(x), crc), found, 0))
        for x, (path, _, dtype) in zip(found, self.like, strict=True):
            where = f"batch{jax.tree_util.keystr(path)} of step {t} of hg.host_batches"
            check_number(where, x, dtype)
            _check_fits(where, x, dtype)
        # Copied: a loader may fill the same memory again while the device still reads it.
        return [jnp.array(x, dtype, copy=True) for x, (_, _, dtype) in zip(found, self.like, strict=True)]

    def _remember(self, t: int, seen: int) -> None:
        if self.prints.setdefault(t, seen) != seen:
            raise ReversalError(
                f"`batches` gave another batch for step {t} than before, so that the run could not be reversed: "
                "hg.host_batches needs a function of the step alone. Draw from np.random.default_rng((seed, t)), not from "
                "one generator; take a new hg.host_batches for new data."
            )


def full_batch(data: Any) -> FullBatch:
    """t -> data: every step sees all of it. A pytree of arrays."""
    return FullBatch(_owned("hg.full_batch", data))


def stacked(arrays: Any) -> Stacked:
    """t -> arrays[t]: the leading axis is the step, and its length gives `steps`. A pytree of arrays [steps, ...]."""
    arrays = _owned("hg.stacked", arrays)
    _leading_axis("hg.stacked", arrays)
    return Stacked(arrays)


def minibatches(data: Any, batch_size: int, key: Array, replacement: bool = False) -> Minibatches:
    """t -> `batch_size` rows of `data`: shuffled passes over all rows, or independent draws with `replacement`.

    data: a pytree of arrays [examples, ...]; key: a JAX key, the only source of randomness. Without replacement every
    pass sees each example once in an order of its own (swap-or-not shuffle, Hoang, Morris, Rogaway 2012: the row at a
    position is computed, no permutation is stored), and no rest is dropped: a batch may straddle two passes.
    """
    data = _owned("hg.minibatches", data)
    size = _leading_axis("hg.minibatches", data)
    rows = as_int(batch_size)
    if rows is None or not 1 <= rows <= size:
        raise ValueError(f"`batch_size` must be an integer from 1 to the {size} examples of `data`; got {batch_size!r}.")
    if size * rows >= 2**31:
        raise ValueError(f"{size} examples x batch_size {rows} overflows 32-bit positions; take smaller batches.")
    if not isinstance(replacement, (bool, np.bool_)):
        raise TypeError(f"`replacement` of hg.minibatches must be True or False; got {replacement!r}.")
    return Minibatches(data, check_key(key), rows, bool(replacement))


def host_batches(source: Any) -> HostBatches:
    """t -> source[t], or source(t), loaded by Python while training runs: data that does not fit, files, data bases.

    source: a list of batches, an array on disk (`np.memmap`, or anything with a length and an index) whose leading axis is
    the step, or a function of a Python int, for which `steps` is required. A batch is a pytree of arrays, of the same shapes
    at every step. Training then runs from Python (outside of `jax.jit` and `jax.vmap`; `hg.optimize(..., jit=False)`), once
    forwards and once backwards: `source` must give the same batch again, which is checked by a checksum of each.
    """
    if isinstance(source, (tuple, dict, str)):
        raise TypeError(
            f"hg.host_batches got a {type(source).__name__}, which could be one batch or many. Pass a list of batches, or "
            "for several arrays a function: hg.host_batches(lambda t: (x[t], y[t]))."
        )
    if callable(source):
        return HostBatches(source, None)
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise TypeError(
            f"hg.host_batches needs a list, an array with a leading axis of steps, or a function t -> batch; got "
            f"{type(source).__name__}. An iterator gives a batch once, and the way back needs it again."
        )
    if not len(source):
        raise ValueError("hg.host_batches got no batches.")
    return HostBatches(source.__getitem__, len(source))


def _known(x: Any) -> np.ndarray:
    if isinstance(x, jax.core.Tracer):
        raise ValueError(
            "a batch of hg.host_batches is traced: its source reads a value of a function that JAX compiles or transforms. "
            "Training by it runs from Python, with values: leave jax.jit and jax.vmap away, hg.optimize(..., jit=False). "
            "Learned data goes through `theta`."
        )
    if not eqx.is_array_like(x) or (isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
        raise TypeError(
            f"a batch of hg.host_batches holds a {type(x).__name__}; its leaves must be arrays. Of a JAX key pass the "
            "integers, jax.random.key_data(key)."
        )
    if np.ma.is_masked(x):
        check_number("a batch of hg.host_batches", x)
    return np.asarray(x)


def _check_fits(where: str, x: np.ndarray, dtype: Any) -> None:
    """Floats of another dtype than those of step 0, which all steps have."""
    if x.dtype == dtype or not jnp.issubdtype(dtype, jnp.floating):
        return
    with np.errstate(over="ignore"):
        lost = np.isfinite(x) & ~np.isfinite(x.astype(dtype))
    if lost.any():
        raise ValueError(
            f"{where}: {x[lost][0]!s} is beyond {np.dtype(dtype).name}, the dtype at step 0. Give all steps the wider one."
        )


def _bytes(x: np.ndarray) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _owned(name: str, data: Any) -> Any:
    """Arrays of JAX, of data that is numbers."""

    def one(path: Any, x: Any) -> Any:
        place = f"data{jax.tree_util.keystr(path)}"
        if hasattr(x, "__array__") and not eqx.is_array_like(x):  # tensors, tables, arrays in files
            x = np.asarray(x)
        of_numpy = isinstance(x, (np.ndarray, np.generic))
        if eqx.is_array_like(x) and not (of_numpy and not jnp.issubdtype(x.dtype, jnp.number) and x.dtype != bool):
            check_number(f"{name}: {place}", x)
            return owned(x)
        kind = f"an array of {x.dtype}" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
        cure = " A function of the step is a source of batches by itself: pass it to hg.train as it is." * callable(x)
        raise TypeError(f"{name} takes a pytree of arrays of numbers; {place} is {kind}.{cure}")

    return jax.tree_util.tree_map_with_path(one, data)


def check_key(key: Any) -> Array:
    """One key, typed or of raw integers."""
    if not hasattr(key, "dtype"):
        raise TypeError(f"`key` must be a JAX key such as jax.random.key(0); got {type(key).__name__} {key!r}.")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and (key.dtype != np.uint32 or not key.ndim):
        raise TypeError(f"`key` must be a JAX key such as jax.random.key(0); got {key.dtype}{list(key.shape)}.")
    if not typed and key.shape[-1] != (width := _raw_width()):
        raise TypeError(
            f"`key` is {key.dtype}{list(key.shape)}; raw keys here have {width} numbers. Pass a typed key, such as "
            "jax.random.key(0) or jax.random.wrap_key_data(key, impl=...)."
        )
    if lead := key.shape if typed else key.shape[:-1]:
        raise ValueError(
            f"`key` must be one key; got keys of shape {lead}. Take one of them, keys[0], or jax.vmap over them."
        )
    return key


def _raw_width() -> int:
    """Numbers of a raw key, by the generator that is set now."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape[-1]


def _leading_axis(name: str, arrays: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    if not leaves:
        raise ValueError(f"{name} got no arrays.")
    sizes = {jax.tree_util.keystr(path): x.shape[0] if x.ndim else 0 for path, x in leaves}  # a scalar has no axis
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        listed = ", ".join(f"{path or 'data'}: {size}" for path, size in sizes.items())
        raise ValueError(f"{name} needs arrays with one equal, non-empty leading axis; got lengths {listed}.")
    return next(iter(sizes.values()))


def _shuffled(key: Array, epoch: Array, x: Array, size: int) -> Array:
    """The row at position x of a pass: a keyed permutation of 0..size-1, computed pointwise.

    Each round pairs x with (k - x) mod size and swaps the pair or not by one hashed bit, so it is its own inverse.
    """
    words = jax.random.bits(key, (_SHUFFLE_ROUNDS, 2), jnp.uint32)

    def one_round(x: Array, words: Array) -> tuple[Array, None]:
        pivot = (_hash(words[0], epoch) % size).astype(jnp.int32)
        partner = jnp.where(x > pivot, pivot - x + size, pivot - x)
        swap = _hash(words[1] ^ _hash(words[0], epoch), jnp.maximum(x, partner).astype(jnp.uint32)) >> 31
        return jnp.where(swap == 1, partner, x), None

    return jax.lax.scan(one_round, x, words, unroll=4)[0]


def _hash(seed: Array, x: Array) -> Array:
    """A 32-bit mix of (seed, x): murmur3's finalizer."""
    x = x * jnp.uint32(0x9E3779B9) ^ seed
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
