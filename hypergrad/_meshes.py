"""Devices at the door: meshes on which the library computes, and an error for those on which it does not.

Invariant: what passes has shardings that the compiler chooses; none that JAX carries in the types of arrays.
"""

from typing import Any

import jax
from jax.sharding import AxisType

from hypergrad._placement import sharding_of


_CURE = (
    "hg.train leaves it to the compiler how integers and buffers are divided. Make the mesh with automatic axes: "
    "jax.sharding.Mesh(devices, names), or axis_types=(jax.sharding.AxisType.Auto,) * len(names) to jax.make_mesh."
)


def reject_explicit(given: dict[str, Any]) -> None:
    """An error for the first array on a mesh with explicit axes, and for such a mesh in force. given: trees by name."""
    if axes := _explicit(jax.sharding.get_abstract_mesh()):
        raise TypeError(f"jax.set_mesh has put a mesh with explicit axes {axes} in force, which make types. {_CURE}")
    for name, tree in given.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if axes := _explicit_axes(x):
                where = f"{name}{jax.tree_util.keystr(path)}"
                raise TypeError(f"`{where}` lies on a mesh with explicit axes {axes}, which are part of its type. {_CURE}")


def reject_explicit_mesh(name: str, mesh: Any) -> None:
    if axes := _explicit(mesh):
        raise TypeError(f"`{name}` has explicit axes {axes}, which make types. {_CURE}")


def _explicit_axes(x: Any) -> tuple[str, ...]:
    """Of an array whose value is known; under `jax.jit` JAX keeps the types itself, and it may go well."""
    return _explicit(getattr(sharding_of(x), "mesh", None))


def _explicit(mesh: Any) -> tuple[str, ...]:
    """The names of the explicit axes of a mesh that divide anything."""
    if mesh is None or mesh.empty:
        return ()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return tuple(name for name, size, kind in axes if kind == AxisType.Explicit and size > 1)
