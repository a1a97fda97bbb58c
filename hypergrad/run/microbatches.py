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
from hypergrad.exact import Offsets, Sum


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

    def mean(self, function: Callable[..., Any], bits: Any, shared: Any, batch: list[Any]) -> Any:
        """sum_m function(shared, part m) / count, of a pytree of floats, by integers: without a derivative.

        function: closes over no array. bits: of what it returns, a pytree prefix: those of `Sum`. shared: a pytree of
        arrays.
        """
        like = self._like(function, shared, batch)
        leaves, tree = jax.tree.flatten(like)
        of_leaves = jax.tree.leaves(jax.tree.map(lambda n, x: jax.tree.map(lambda _: n, x), bits, like))
        flat = lambda shared, part: once_each(lambda *a: jax.tree.leaves(function(*a)), shared, part)  # noqa: E731
        with own_settings():
            return jax.tree.unflatten(tree, self._spread(flat, leaves, of_leaves, shared, batch))

    def mean_of_floats(self, function: Callable[..., Any], shared: Any, batch: list[Any]) -> Any:
        """`mean` in floats, differentiable any number of times."""

        def body(sums: Any, m: Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, function(shared, self.part(batch, m))), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._like(function, shared, batch))
        sums, _ = jax.lax.scan(body, zeros, jnp.arange(self.count, dtype=jnp.int32))
        return jax.tree.map(lambda x: x / self.count, sums)

    def _like(self, function: Callable[..., Any], shared: Any, batch: list[Any]) -> Any:
        return jax.eval_shape(lambda shared, batch: function(shared, self.part(batch, 0)), shared, batch)

    def part(self, batch: list[Any], m: Any, parts: int | None = None) -> list[Any]:
        """Part m of so many; of a scalar, all of it; of a key, one of its own."""
        parts = self.count if parts is None else parts
        return [_part(x, m, parts) for x in batch]

    def _spread(
        self, function: Callable[..., list[Array]], like: list[Any], bits: list[int], shared: Any, batch: list[Any]
    ) -> list[Array]:
        if self.devices == 1:
            return self._own(function, like, bits, None, shared, batch)
        own = functools.partial(self._own, function, like, bits, self.axis)
        whole, divided = PartitionSpec(), PartitionSpec(self.axis)
        of_batch = [divided if x.ndim else whole for x in batch]
        names = frozenset((self.axis,) if isinstance(self.axis, str) else self.axis or ())
        spread = jax.shard_map(
            own, mesh=self.mesh, in_specs=(whole, of_batch), out_specs=whole, axis_names=names, check_vma=False
        )
        return spread(shared, batch)

    def _own(
        self,
        function: Callable[..., list[Array]],
        like: list[Any],
        bits: list[int],
        axis: Any,
        shared: Any,
        batch: list[Any],
    ) -> list[Array]:
        """What one device does; axis: along which there are others."""
        parts = self.count // self.devices
        first: Any = 0 if axis is None else jax.lax.axis_index(axis) * parts
        taken = unseen()  # a loop over one part is none, and XLA would see that a branch in it is always taken
        offsets = {b: Offsets.of(b, taken) for b in bits}

        def body(i: Array, sums: list[Sum]) -> list[Sum]:
            part = [_part(x, i, parts) if x.ndim else _scalar(x, first + i) for x in batch]
            found = behind_branch(taken, function, shared, part)
            return [s.add(x, self.count, offsets[b], b) for s, x, b in zip(sums, found, bits, strict=True)]

        sums = jax.lax.fori_loop(0, parts, body, [Sum.zeros_like(x) for x in like])
        if axis is not None:
            sums = [s.over(axis) for s in sums]
        return [s.mean(x.dtype, self.count, b) for s, x, b in zip(sums, like, bits, strict=True)]


def _part(x: Array, m: Any, parts: int) -> Array:
    if not x.ndim:
        return _scalar(x, m)
    rows = x.shape[0] // parts
    return jax.lax.dynamic_slice_in_dim(x, m * rows, rows)


def _scalar(x: Array, m: Any) -> Array:
    """Each part has a key of its own."""
    return jax.random.fold_in(x, m) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
