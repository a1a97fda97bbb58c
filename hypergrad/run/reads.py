"""What a step reads of theta: rows by index, one value of those per step, or the whole.

Invariant: `Read.give` is the transpose of `Read.take`, added in place: a step costs what it reads, not what there is.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend.core import Jaxpr, Literal
from jax.extend.core.primitives import dynamic_slice_p, gather_p

from hypergrad._lifted import interpreted
from hypergrad._program_keys import key_of
from hypergrad._programs import Program, closing_over


# What is negative in an equation has been counted from the end already, or is meant to be clamped to the first row.
AS_THEY_ARE = {"allow_negative_indices": False}


class Read(NamedTuple):
    """A gather or a slice of a leaf of theta, at indices that the batch alone decides; hashable."""

    leaf: int
    params: tuple[tuple[str, Any], ...]  # as its equation has them
    indices: int  # how many arrays of indices it takes

    def take(self, x: Array, indices: list[Array]) -> Array:
        given = dict(self.params)
        if "dimension_numbers" not in given:
            return jax.lax.dynamic_slice(x, indices, given["slice_sizes"], **AS_THEY_ARE)
        return jax.lax.gather(x, indices[0], **given)

    def give(self, total: Array, indices: list[Array], d: Array) -> Array:
        """total + the cotangent of x from that of take(x)."""
        given, d = dict(self.params), d.astype(total.dtype)
        if "dimension_numbers" not in given:
            here = jax.lax.dynamic_slice(total, indices, given["slice_sizes"], **AS_THEY_ARE)
            return jax.lax.dynamic_update_slice(total, here + d, indices, **AS_THEY_ARE)
        numbers = given["dimension_numbers"]
        return jax.lax.scatter_add(
            total,
            indices[0],
            d,
            jax.lax.ScatterDimensionNumbers(
                numbers.offset_dims,
                numbers.collapsed_slice_dims,
                numbers.start_index_map,
                numbers.operand_batching_dims,
                numbers.start_indices_batching_dims,
            ),
            indices_are_sorted=given["indices_are_sorted"],
            unique_indices=given["unique_indices"],
            mode=given["mode"],
        )


@dataclasses.dataclass(frozen=True)
class StepTheta:
    """Which of theta a step sees, leaf by leaf: all of it, its own of one value per step, or rows of it."""

    stepped: tuple[bool, ...]  # of each leaf: whether it has a leading axis of steps
    reads: tuple[Read, ...] = ()
    indices: Program | None = None  # as `Found` has them

    def bare(self) -> "StepTheta":
        return dataclasses.replace(self, indices=None if self.indices is None else self.indices.bare())

    def parted(self, theta: list[Any]) -> tuple[list[Any], list[Any]]:
        """(what is the same at all steps, what has an axis of steps)"""
        return (
            [x for x, stepped in zip(theta, self.stepped, strict=True) if not stepped],
            [x for x, stepped in zip(theta, self.stepped, strict=True) if stepped],
        )

    def together(self, constant: list[Any], stepped: list[Any]) -> list[Any]:
        """The inverse of `parted`."""
        of = iter(constant), iter(stepped)
        return [next(of[is_stepped]) for is_stepped in self.stepped]

    def own(self, leaf: int) -> list[int]:
        """The reads of a leaf."""
        return [k for k, read in enumerate(self.reads) if read.leaf == leaf]

    def seen(self, theta: list[Array], indices: list[list[Array]]) -> list[Array]:
        """What the loss takes: rows in the place of leaves that have reads. theta: with the step's own of each leaf."""
        taken = [read.take(theta[read.leaf], at) for read, at in zip(self.reads, indices, strict=True)]
        return [x for i, whole in enumerate(theta) for x in ([taken[k] for k in self.own(i)] or [whole])]

    def flags(self, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
        """Of what the loss takes, from those of the leaves."""
        return tuple(flag for i, flag in enumerate(wanted) for _ in self.own(i) or [i])

    def added(
        self, wanted: tuple[bool, ...], totals: list[Array], dseen: list[Array], indices: list[list[Array]]
    ) -> tuple[list[Array], list[Array]]:
        """The transpose of `seen`, of the wanted leaves: (totals + the cotangents of what is the same at all steps, those of
        what has an axis of steps)."""
        left, before = iter(dseen), iter(totals)
        sums, stepped = [], []
        for i, is_wanted in enumerate(wanted):
            if not is_wanted:
                continue
            if self.stepped[i]:
                stepped.append(next(left))
                continue
            total = next(before)
            for k in self.own(i):
                total = self.reads[k].give(total, indices[k], next(left))
            sums.append(total if self.own(i) else total + next(left).astype(total.dtype))
        return sums, stepped


class Found(NamedTuple):
    """A loss, and what it reads by index."""

    loss: Program  # of what it reads in the place of the leaves that it reads by index alone
    reads: tuple[Read, ...]
    indices: Program | None  # like the loss, but of (theta's other leaves, batch) alone -> the indices of all reads


def reads_of(loss: Program, sizes: tuple[int, int, int, int], whole: Sequence[bool], traced: Sequence[bool]) -> Found:
    """The leaves of theta of which a loss reads rows alone, their indices made of the batch and of arrays that are known.

    sizes: how many leaves w, theta, theta's other leaves and the batch have; whole: of each of theta, whether it may not be
    read so; traced: of each constant, whether somebody may differentiate it.
    """
    jaxpr = loss.jaxpr
    n_w, n_theta, *_ = sizes
    theta = jaxpr.invars[n_w : n_w + n_theta]
    if any(e.primitive.name == "jit" and not set(theta).isdisjoint(_variables(e.invars)) for e in jaxpr.eqns):
        jaxpr = _inlined(jaxpr)
        theta = jaxpr.invars[n_w : n_w + n_theta]
    known = {x for x, is_traced in zip(jaxpr.constvars, traced, strict=True) if not is_traced}
    known |= set(jaxpr.invars[n_w + n_theta :])
    for e in jaxpr.eqns:
        if known.issuperset(_variables(e.invars)) and not e.effects:
            known |= set(e.outvars)
    by_row: dict[Any, int] = {x: i for i, x in enumerate(theta) if not whole[i] and _is_read_by_row(jaxpr, x, known)}
    if not by_row:
        return Found(loss, (), None)
    found = sorted((e for e in jaxpr.eqns if _first(e) in by_row), key=lambda e: by_row[e.invars[0]])
    reads = tuple(Read(by_row[e.invars[0]], tuple(e.params.items()), len(e.invars) - 1) for e in found)
    of_leaf = [[e.outvars[0] for e in found if e.invars[0] is x] if x in by_row else [x] for x in theta]
    rest = jaxpr.invars[n_w + n_theta :]
    arguments = [*jaxpr.invars[:n_w], *(x for xs in of_leaf for x in xs), *rest]
    outer = jaxpr.replace(invars=arguments, eqns=[e for e in jaxpr.eqns if _first(e) not in by_row])
    indices: list[Any] = [x for e in found for x in e.invars[1:]]
    inner = jaxpr.replace(invars=rest, eqns=_needed(jaxpr, indices), outvars=indices, effects=frozenset())
    like = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in indices]
    return Found(Program(outer, loss.key, loss.out), reads, Program(inner, key_of(inner), like))


def _is_read_by_row(jaxpr: Jaxpr, x: Any, known: set[Any]) -> bool:
    uses = [e for e in jaxpr.eqns if x in _variables(e.invars)]
    by_row = all(
        e.primitive in (gather_p, dynamic_slice_p) and e.invars[0] is x and known.issuperset(_variables(e.invars[1:]))
        for e in uses
    )
    return bool(uses) and by_row and not any(x is y for y in jaxpr.outvars)


def _first(e: Any) -> Any:
    return e.invars[0] if e.invars and not isinstance(e.invars[0], Literal) else None


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [x for x in atoms if not isinstance(x, Literal)]


def _needed(jaxpr: Jaxpr, wanted: Sequence[Any]) -> list[Any]:
    """The equations that these are made by."""
    missing, found = set(_variables(wanted)), []
    for e in reversed(jaxpr.eqns):
        if not missing.isdisjoint(e.outvars):
            missing |= set(_variables(e.invars))
            found.append(e)
    return found[::-1]


def _inlined(jaxpr: Jaxpr) -> Jaxpr:
    """Without calls of `jax.jit`."""

    def inlined(e: Any, arrays: list[Any]) -> list[Any] | None:
        inner: Any = e.params.get("jaxpr")
        return interpreted(inner.jaxpr, inner.consts, arrays, inlined) if e.primitive.name == "jit" else None

    n = len(jaxpr.constvars)
    function = lambda *leaves: interpreted(jaxpr, list(leaves[:n]), leaves[n:], inlined)  # noqa: E731
    made = jax.make_jaxpr(function)(*(x.aval for x in (*jaxpr.constvars, *jaxpr.invars))).jaxpr
    return closing_over(made, made.invars[:n], made.invars[n:])
