"""Microbatches at the door: into how many parts a batch is cut, and over which devices of which mesh they are spread.

Invariant: what passes can be cut, part by part of one shape, and its devices have as many parts each.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from hypergrad._closures import name_in, name_of
from hypergrad._meshes import automatic, divided_by
from hypergrad._placement import in_shard_map, mesh_in_force, sharding_of
from hypergrad.exact import TERMS
from hypergrad.hypers import describe
from hypergrad.run.microbatches import Microbatches


def spread(given: Any, batches: Any, others: Any) -> Microbatches | None:
    """What `microbatches` of `hg.train` says, with the mesh and its axis. others: all else that may lie on a mesh."""
    if given is None:
        return None
    asked = given if isinstance(given, Microbatches) else Microbatches(given)
    count = asked.count
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
        raise TypeError(f"`microbatches` must be an int, or hg.Microbatches(count, axis, mesh); got {describe(count)}.")
    if not 1 <= count <= TERMS:
        raise ValueError(f"`microbatches` must be from 1 to {TERMS}; got {count}.")
    names = (asked.axis,) if isinstance(asked.axis, str) else asked.axis
    if names is not None and not (
        isinstance(names, (tuple, list)) and names and all(isinstance(x, str) for x in names) and len({*names}) == len(names)
    ):
        raise TypeError(
            f"`axis` of hg.Microbatches must be the name of an axis of the mesh, or a tuple of several; got {asked.axis!r}."
        )
    if asked.mesh is not None and not isinstance(asked.mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"`mesh` of hg.Microbatches must be a jax.sharding.Mesh; got {describe(asked.mesh)}.")
    if in_shard_map() and (asked.mesh is not None or names is not None):
        raise ValueError(
            "hg.Microbatches(axis=, mesh=) inside of a jax.shard_map: each device trains for itself there, with all of its "
            f"microbatches. Pass microbatches={int(count)}; or take hg.train out of the jax.shard_map."
        )
    mesh = automatic(asked.mesh) if asked.mesh is not None else _mesh(batches, others)
    if mesh is None or mesh.empty:
        if asked.axis is not None:
            raise ValueError(
                f"hg.Microbatches(axis={asked.axis!r}) names an axis, and there is no mesh: none is in force "
                "(jax.set_mesh), and no array is known to lie on one. Pass mesh=, which jax.jit asks for in any case; or "
                "leave out the axis."
            )
        return Microbatches(int(count))
    if unknown := [name for name in names or () if name not in mesh.axis_names]:
        raise ValueError(
            f"hg.Microbatches(axis={asked.axis!r}): the mesh has the axes {mesh.axis_names}, and no {unknown[0]!r}."
        )
    if mesh.size == 1:
        return Microbatches(int(count))
    found = Microbatches(int(count), tuple(names) if names else _axis(mesh, batches), mesh)
    if count % found.devices:
        along = (found.axis,) if isinstance(found.axis, str) else found.axis or ()
        raise ValueError(
            f"microbatches={count} do not divide among the {found.devices} devices along {', '.join(map(repr, along))}: "
            f"each has as many. Take a multiple of {found.devices}."
        )
    return found


def part_of(microbatches: Microbatches, batch: Any) -> list[jax.ShapeDtypeStruct]:
    """The leaves of a microbatch, of those of a batch as they are traced."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    rows = next((x.shape[0] for _, x in leaves if x.shape), None)
    if rows is None:
        raise ValueError(
            f"microbatches={microbatches.count} cut a batch by rows, and this one has none: {describe(batch)}. Leave "
            "`microbatches` out."
        )
    for path, x in leaves:
        if x.shape and x.shape[0] != rows:
            raise ValueError(
                f"microbatches={microbatches.count} cut all arrays of a batch by rows: "
                f"batch{jax.tree_util.keystr(path)} has shape {x.shape}, and others have {rows} rows. What all rows share "
                "goes through theta, or into the loss; a random key must be a typed one (jax.random.key), of which each "
                "microbatch gets its own."
            )
    if rows % microbatches.count:
        divisors = [d for d in range(1, rows + 1) if rows % d == 0]
        raise ValueError(
            f"microbatches={microbatches.count} do not divide the {rows} rows of a batch. They would be of other sizes; "
            f"take one of {', '.join(map(str, divisors[:12]))}{', ...' if len(divisors) > 12 else ''}."
        )
    cut = lambda x: x.shape and (rows // microbatches.count, *x.shape[1:])  # noqa: E731
    return [jax.ShapeDtypeStruct(cut(x), x.dtype, weak_type=getattr(x, "weak_type", False)) for _, x in leaves]


@contextlib.contextmanager
def without_mesh(microbatches: Microbatches | None, arguments: Any) -> Iterator[Any]:
    """Where a loss is traced, and with what. A program remembers the mesh in force, as its arguments do, and a device that
    computes its microbatches alone is on none."""
    if microbatches is None or microbatches.devices == 1:
        yield arguments
        return
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))  # noqa: E731
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            yield jax.tree.map(like, arguments)
    except RuntimeError as error:
        if "non-empty mesh" not in str(error):
            raise
        raise _divided(microbatches, "a jax.sharding.PartitionSpec") from error


def reject_on_mesh(microbatches: Microbatches | None, loss: Any, held: list[Any]) -> None:
    """held: what the loss reads from outside."""
    if microbatches is None or microbatches.devices == 1 or mesh_in_force() is None:
        return
    for x in held:
        if isinstance(x, jax.core.Tracer):
            raise ValueError(
                f"`loss` ({name_of(loss)}) reads the traced value {name_in(loss, x)} from outside, and jax.set_mesh has "
                "made the mesh a part of its type, which a device that computes its microbatches alone is not on. Pass it "
                "through theta or the batch; or name the mesh instead, hg.Microbatches(count, mesh=mesh)."
            )


def check_loss(microbatches: Microbatches | None, loss: Jaxpr) -> None:
    if microbatches is None or microbatches.devices == 1:
        return
    if by := divided_by(loss):
        raise _divided(microbatches, by)


def _divided(microbatches: Microbatches, by: str) -> ValueError:
    return ValueError(
        f"`loss` divides its work among devices itself ({by}), and microbatches={microbatches.count} are spread over "
        f"devices: each device computes its own, whole. Write the loss of rows, without {by.split('.')[-1]}; or leave "
        "`microbatches` out."
    )


def _mesh(batches: Any, others: Any) -> Any:
    """The mesh in force, or that of the first array on one whose value is known; None: there is none."""
    if in_shard_map():
        return None
    return mesh_in_force() or next((s.mesh for tree in (batches, others) for s in _shardings(tree)), None)


def _axis(mesh: Any, batches: Any) -> str | tuple[str, ...]:
    """The axis of the mesh along which the batches are divided, or the only one that divides anything."""
    found = {names for s in _shardings(batches) for names in s.spec if names is not None}
    used = {names for names in found if {*(names if isinstance(names, tuple) else (names,))} <= {*mesh.axis_names}}
    used = used or {name for name in mesh.axis_names if mesh.shape[name] > 1}
    if len(used) != 1:
        raise ValueError(
            f"`microbatches` do not know which axis of the mesh to be spread along: it has {mesh.axis_names}. Name it: "
            f"hg.Microbatches(count, axis={mesh.axis_names[0]!r})."
        )
    return used.pop()


def _shardings(tree: Any) -> list[NamedSharding]:
    return [s for s in map(sharding_of, jax.tree.leaves(tree)) if s is not None]
