"""Microbatches: what is computed of a batch as the mean over its parts, each alone, whatever device it is on.

Invariant: a mean has the same bits for any number of devices that divides the number of parts. Each part is computed by the
same program, rounded once, and added to the others as integers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from hypergrad._duplicates import once_each
from hypergrad._isolation import behind_branch, unseen
from hypergrad._settings import own_settings
from hypergrad.exact import Offsets, Sum, sum_range


# How means are made, where it is not by `Sum` with fixed bits.
IN_ORDER = -1  # of scalars: all are kept, and added one after the other
SCALED = -2  # of what may be of any size
_DONE = 2
SCALED_BITS = 30  # terms below 2^16 times their unit, rounded to 2^-78 of it


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """A batch in `count` parts of as many rows, spread over the devices along `axis` of `mesh`; for `hg.train`.

    axis: a name, or several. None: the one along which `batches` is divided, or the only one. mesh: None: the one in force
    (`jax.set_mesh`), or that of the arrays that are given to `hg.train`. Inside of `jax.jit` arrays do not tell: there,
    name the mesh or put it in force.
    """

    count: int
    axis: str | tuple[str, ...] | None = None
    mesh: Any = None

    @property
    def devices(self) -> int:
        if self.mesh is None or self.axis is None:
            return 1
        names = (self.axis,) if isinstance(self.axis, str) else self.axis
        return int(functools.reduce(lambda n, name: n * self.mesh.shape[name], names, 1))

    def alone(self) -> "Microbatches":
        """The same parts on one device: the same bits."""
        return Microbatches(self.count)

    def mean(self, function: Callable[..., Any], kinds: Any, shared: Any, batch: list[Any], unit: Any = 1.0) -> Any:
        """sum_m function(shared, part m) / count, of a pytree of floats, by integers: without a derivative.

        function: closes over no array. kinds: of what it returns, a pytree prefix: `IN_ORDER`, `SCALED`, or the bits of a
        `Sum`. shared: a pytree of arrays. unit: float [], the size that what is `SCALED` is expected to have.
        """
        like = self._like(function, shared, batch)
        leaves, tree = jax.tree.flatten(like)
        of_leaves = jax.tree.leaves(jax.tree.map(lambda n, x: jax.tree.map(lambda _: n, x), kinds, like))
        flat = lambda shared, part: once_each(lambda *a: jax.tree.leaves(function(*a)), shared, part)  # noqa: E731
        with own_settings():
            return jax.tree.unflatten(tree, self._spread(flat, leaves, of_leaves, shared, batch, jnp.float64(unit)))

    def mean_of_floats(self, function: Callable[..., Any], shared: Any, batch: list[Any]) -> Any:
        """`mean` in floats, differentiable any number of times."""
        like = self._like(function, shared, batch)
        wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731

        def body(sums: Any, m: Array) -> tuple[Any, None]:
            found = function(shared, self.part(batch, m))
            return jax.tree.map(lambda s, x: s + wide(x) / self.count, sums, found), None

        zeros = jax.tree.map(lambda x: wide(jnp.zeros(x.shape, x.dtype)), like)
        sums, _ = jax.lax.scan(body, zeros, jnp.arange(self.count, dtype=jnp.int32))
        return jax.tree.map(lambda x, s: s.astype(x.dtype), like, sums)

    def _like(self, function: Callable[..., Any], shared: Any, batch: list[Any]) -> Any:
        return jax.eval_shape(lambda shared, batch: function(shared, self.part(batch, 0)), shared, batch)

    def part(self, batch: list[Any], m: Any, parts: int | None = None) -> list[Any]:
        """Part m of so many; of a scalar, all of it; of a key, one of its own."""
        parts = self.count if parts is None else parts
        return [_part(x, m, parts) for x in batch]

    def _spread(self, function: Any, like: list[Any], kinds: list[int], shared: Any, batch: list[Any], unit: Array) -> Any:
        own = functools.partial(self._own, function, like, kinds)
        if self.devices == 1:
            return own(shared, batch, unit)
        whole, divided = PartitionSpec(), PartitionSpec(self.axis)
        names = frozenset((self.axis,) if isinstance(self.axis, str) else self.axis or ())
        specs = whole, [divided if x.ndim else whole for x in batch], whole
        options: Any = {"axis_names": names, "check_vma": False}
        return jax.shard_map(own, mesh=self.mesh, in_specs=specs, out_specs=whole, **options)(shared, batch, unit)

    def _own(
        self, function: Any, like: list[Any], kinds: list[int], shared: Any, batch: list[Any], unit: Array
    ) -> list[Array]:
        """What one device does, and what it hears of the others.

        What is `SCALED` is added in quanta that go with the largest term, which is known when all have been seen. They are
        first taken to be of the size of `unit`; where that was too fine or too coarse for one, all are computed again.
        """
        parts = self.count // self.devices
        first: Any = 0 if self.devices == 1 else jax.lax.axis_index(self.axis) * parts
        taken = unseen()  # a loop over one part is none, and XLA would see that a branch in it is always taken
        offsets = {b: Offsets.of(b, taken) for b in (*kinds, SCALED_BITS) if b >= 0}

        def add(i: Array, kept: list[Any], exponents: list[Array]) -> list[Any]:
            part = [_part(x, i, parts) if x.ndim else _scalar(x, first + i) for x in batch]
            found = behind_branch(taken, function, shared, part)
            return [self._added(*of, offsets, first + i) for of in zip(kept, found, kinds, exponents, strict=True)]

        def all_parts(exponents: list[Array]) -> list[Any]:
            kept = [self._nothing(x, kind) for x, kind in zip(like, kinds, strict=True)]
            kept = jax.lax.fori_loop(0, parts, lambda i, kept: add(i, kept, exponents), kept)
            return kept if self.devices == 1 else [self._together(x, kind) for x, kind in zip(kept, kinds, strict=True)]

        exponents = [_exponent(unit)] * len(kinds)
        if SCALED in kinds:

            def again(carry: Any) -> Any:
                round, old, _ = carry
                kept = all_parts(old)
                rated = [
                    _rated(e, x) if kind == SCALED else (e, jnp.bool_(True))
                    for e, x, kind in zip(old, kept, kinds, strict=True)
                ]
                fine = (round > 0) | functools.reduce(jnp.logical_and, [ok for _, ok in rated])
                new = [jnp.where(fine, e, other) for e, (other, _) in zip(old, rated, strict=True)]
                return jnp.where(fine, _DONE, round + 1).astype(jnp.int32), new, kept

            nothing = [self._nothing(x, kind) for x, kind in zip(like, kinds, strict=True)]
            carry = jnp.int32(0), exponents, nothing
            _, exponents, kept = jax.lax.while_loop(lambda carry: carry[0] < _DONE, again, carry)
        else:
            kept = all_parts(exponents)
        return [self._mean(*of) for of in zip(kept, kinds, exponents, like, strict=True)]

    def _nothing(self, x: Any, kind: int) -> Any:
        if kind == IN_ORDER:
            return jnp.zeros((self.count, *x.shape), x.dtype)
        return (Sum.zeros_like(x), _size(jnp.zeros((), x.dtype))) if kind == SCALED else Sum.zeros_like(x)

    def _added(self, kept: Any, x: Array, kind: int, exponent: Array, offsets: dict[int, Offsets], m: Any) -> Any:
        if kind == IN_ORDER:
            return kept.at[m].set(x)
        if kind == SCALED:
            total, largest = kept
            scaled = x.astype(jnp.float64) * _power(-exponent)
            return total.add(scaled, self.count, offsets[SCALED_BITS], SCALED_BITS), jnp.maximum(largest, _size(x))
        return kept.add(x, self.count, offsets[kind], kind)

    def _together(self, kept: Any, kind: int) -> Any:
        """What all devices have."""
        if kind == IN_ORDER:
            return jax.lax.psum(kept, self.axis)  # of which all but one are zeros
        if kind == SCALED:
            return kept[0].over(self.axis), jax.lax.pmax(kept[1], self.axis)
        return kept.over(self.axis)

    def _mean(self, kept: Any, kind: int, exponent: Array, x: Any) -> Array:
        if kind == IN_ORDER:
            wide = kept.astype(jnp.promote_types(x.dtype, jnp.float32))
            total = jax.lax.fori_loop(1, self.count, lambda m, sum: sum + wide[m], wide[0])
            return (total / self.count).astype(x.dtype)
        if kind == SCALED:
            return (kept[0].mean(jnp.float64, self.count, SCALED_BITS) * _power(exponent)).astype(x.dtype)
        return kept.mean(x.dtype, self.count, kind)


def _size(x: Array) -> Array:
    """The largest magnitude as the bits of a float, which are in the same order, and NaN above all: int64 []."""
    wide = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    whole = jnp.int64 if wide.dtype == jnp.float64 else jnp.int32
    return jnp.max(jax.lax.bitcast_convert_type(wide, whole), initial=0)


def _rated(exponent: Array, kept: Any) -> tuple[Array, Array]:
    """(the exponent of the largest term, whether the sum is as good by the one that it was made with)."""
    narrow = kept[1].dtype == jnp.int32
    largest = jax.lax.bitcast_convert_type(kept[1], jnp.float32 if narrow else jnp.float64).astype(jnp.float64)
    relative = largest * _power(-exponent)
    fine = (relative < sum_range(SCALED_BITS)) & (relative >= (2.0**-40 if narrow else 2.0**-28))
    return _exponent(largest), fine | (largest == 0) | ~jnp.isfinite(largest)


def _exponent(x: Array) -> Array:
    """int32 [], with x < 2^exponent; 0 of what is zero or no number."""
    usual = jnp.isfinite(x) & (x > 0)
    return jnp.where(usual, jnp.clip(jnp.frexp(jnp.where(usual, x, 1))[1], -1000, 1000), 0).astype(jnp.int32)


def _power(exponent: Array) -> Array:
    """2^exponent, float64 []."""
    return jnp.ldexp(jnp.float64(1), exponent)


def _part(x: Array, m: Any, parts: int) -> Array:
    if not x.ndim:
        return _scalar(x, m)
    rows = x.shape[0] // parts
    return jax.lax.dynamic_slice_in_dim(x, m * rows, rows)


def _scalar(x: Array, m: Any) -> Array:
    """Each part has a key of its own."""
    return jax.random.fold_in(x, m) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
