"""Microbatches: what is computed of a batch as the mean over its parts, each alone, whatever device it is on.

Invariant: a mean has the same bits for any number of devices that divides the number of parts. Each part is computed by the
same program, rounded once, and added to the others as integers.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from hypergrad._duplicates import once_each
from hypergrad._isolation import behind_branch, unseen
from hypergrad._settings import own_settings
from hypergrad.exact import Offsets, exponent_of
from hypergrad.run.means import Adding, Kind, Scaled


Made = list[tuple[Kind, Any]]  # of each result, how its mean is made, and a `ShapeDtypeStruct`


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

    def share(self, cotangents: Any) -> Any:
        """What the mean hands on to each part: rules that are not linear in their cotangent see it."""
        return jax.tree.map(lambda x: x / self.count, cotangents)

    def whole(self, products: Any) -> Any:
        """The inverse for what comes of it, of which a mean is taken."""
        return jax.tree.map(lambda x: x * self.count, products)

    def alone(self) -> "Microbatches":
        """The same parts on one device: the same bits."""
        return Microbatches(self.count)

    def mean(self, function: Callable[..., Any], kinds: Any, shared: Any, batch: list[Any], unit: Any = 1.0) -> Any:
        """sum_m function(shared, part m) / count, of a pytree of floats: without a derivative.

        function: closes over no array. kinds: of what it returns, a pytree prefix (`hypergrad.run.means`). shared: a pytree
        of arrays. unit: float [], the size that what is `Scaled` is expected to have.
        """
        like = self._like(function, shared, batch)
        leaves, tree = jax.tree.flatten(like)
        of_leaves = jax.tree.leaves(jax.tree.map(lambda kind, x: jax.tree.map(lambda _: kind, x), kinds, like))
        made = [(kind, part) for kind, x in zip(of_leaves, leaves, strict=True) for part in _real_parts(x)]
        computed = lambda *a: [part for x in jax.tree.leaves(function(*a)) for part in _real_parts(x)]  # noqa: E731
        flat = functools.partial(once_each, computed)
        with own_settings():
            found = iter(self._spread(flat, made, shared, batch, jnp.float64(unit)))
        return jax.tree.unflatten(tree, [_of_real_parts(x, found) for x in leaves])

    def mean_of_floats(self, function: Callable[..., Any], shared: Any, batch: list[Any]) -> Any:
        """`mean` in floats, differentiable any number of times."""
        like = self._like(function, shared, batch)
        wide = lambda x: x.astype(np.promote_types(x.dtype, np.float32))  # noqa: E731

        def body(sums: Any, m: Array) -> tuple[Any, None]:
            found = function(shared, self.part(batch, m))
            return jax.tree.map(lambda s, x: s + wide(x) / self.count, sums, found), None

        zeros = jax.tree.map(lambda x: wide(jnp.zeros(x.shape, x.dtype)), like)
        sums, _ = jax.lax.scan(body, zeros, jnp.arange(self.count, dtype=jnp.int32))
        return jax.tree.map(lambda x, s: s.astype(x.dtype), like, sums)

    def _like(self, function: Callable[..., Any], shared: Any, batch: list[Any]) -> Any:
        return jax.eval_shape(lambda shared, batch: function(shared, self.part(batch, 0)), shared, batch)

    def part(self, batch: list[Any], m: Any) -> list[Any]:
        """Part m of all; of a scalar, all of it; of a key, one of its own."""
        return [_part(x, m, self.count) for x in batch]

    def _spread(self, function: Any, made: Made, shared: Any, batch: list[Any], unit: Array) -> list[Array]:
        own = functools.partial(self._own, function, made)
        if self.devices == 1:
            return own(shared, batch, unit)
        whole, divided = PartitionSpec(), PartitionSpec(self.axis)
        specs = whole, [divided if x.ndim else whole for x in batch], whole
        # Along all axes, those that divide nothing too: beside an axis that is left to the compiler JAX marks each result
        # with its sharding; XLA then orders the operands of a product otherwise than on one device, and rounds otherwise.
        return jax.shard_map(own, mesh=self.mesh, in_specs=specs, out_specs=whole, check_vma=False)(shared, batch, unit)

    def _own(self, function: Any, made: Made, shared: Any, batch: list[Any], unit: Array) -> list[Array]:
        """What one device does, and what it hears of the others.

        The quanta of what is `Scaled` go with the largest term, which is known when all have been seen. They are first taken
        to be of the size of `unit`; where that was too fine or too coarse for one, all parts are computed again.
        """
        parts = self.count // self.devices
        first: Any = 0 if self.devices == 1 else jax.lax.axis_index(self.axis) * parts
        taken = unseen()  # a loop over one part is none, and XLA would see that a branch in it is always taken
        offsets = {kind.bits: Offsets.of(kind.bits, taken) for kind, _ in made}
        start = [kind.start(x, self.count) for kind, x in made]

        def about(exponents: list[Array]) -> list[Adding]:
            return [Adding(self.count, offsets[kind.bits], e) for (kind, _), e in zip(made, exponents, strict=True)]

        def all_parts(exponents: list[Array]) -> list[Any]:
            def add(i: Array, kept: list[Any]) -> list[Any]:
                part = [_part(x, i, parts) if x.ndim else _scalar(x, first + i) for x in batch]
                found = behind_branch(taken, function, shared, part)
                rows = zip(made, kept, found, about(exponents), strict=True)
                return [kind.add(k, x, first + i, of) for (kind, _), k, x, of in rows]

            kept = jax.lax.fori_loop(0, parts, add, start)
            if self.devices == 1:
                return kept
            return [kind.together(k, self.axis) for (kind, _), k in zip(made, kept, strict=True)]

        def again(carry: Any) -> Any:
            last, exponents, _ = carry
            kept = all_parts(exponents)
            rated = [kind.rated(k, e) for (kind, _), k, e in zip(made, kept, exponents, strict=True)]
            done = last | functools.reduce(jnp.logical_and, [good for _, good in rated])
            new = [jnp.where(done, old, better) for old, (better, _) in zip(exponents, rated, strict=True)]
            return jnp.where(done, _DONE, _LAST), new, kept

        exponents = [exponent_of(unit)] * len(made)
        if any(isinstance(kind, Scaled) for kind, _ in made):
            rounds = jax.lax.while_loop(
                lambda carry: carry[0] < _DONE, lambda c: again((c[0] == _LAST, *c[1:])), (_FIRST, exponents, start)
            )
            _, exponents, kept = rounds
        else:
            kept = all_parts(exponents)
        rows = zip(made, kept, about(exponents), strict=True)
        return [kind.mean(k, x, of) for (kind, x), k, of in rows]


def _real_parts(x: Any) -> list[Any]:
    """What is added up of an array, or of its `ShapeDtypeStruct`: [x], or real and imaginary parts of a complex one."""
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [x]
    if isinstance(x, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(x.shape, jnp.finfo(x.dtype).dtype)] * 2
    return [x.real, x.imag]


def _of_real_parts(like: Any, parts: Iterator[Array]) -> Array:
    """The inverse, of the next of the parts."""
    part = next(parts)
    return jax.lax.complex(part, next(parts)) if jnp.issubdtype(like.dtype, jnp.complexfloating) else part


_FIRST, _LAST, _DONE = np.int32(0), np.int32(1), np.int32(2)  # rounds


def _part(x: Array, m: Any, parts: int) -> Array:
    if not x.ndim:
        return _scalar(x, m)
    rows = x.shape[0] // parts
    return jax.lax.dynamic_slice_in_dim(x, m * rows, rows)


def _scalar(x: Array, m: Any) -> Array:
    """Each part has a key of its own."""
    return jax.random.fold_in(x, m) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
