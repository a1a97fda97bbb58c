"""Devices at the door: meshes whose axes are explicit, as `jax.make_mesh` makes them, become automatic ones inside.

Invariant: what passes has shardings that the compiler chooses; none that JAX carries in the types of arrays.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from hypergrad._placement import sharding_of


_AUTOMATIC = (
    "make the mesh with automatic axes: jax.sharding.Mesh(devices, names), or axis_types=(jax.sharding.AxisType.Auto,) * "
    "len(names) to jax.make_mesh."
)


def explicit_mesh() -> Any:
    """The abstract mesh in force (`jax.set_mesh`), if it has explicit axes, else None."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if _explicit(mesh) else None


def with_automatic_axes(function: Callable[[dict[str, Any]], Any], given: dict[str, Any]) -> Any:
    """function(given), a `Trained`, with the axes of the mesh in force automatic inside. Parameters, and accumulators of
    their shape, come back divided as they came; all else is on every device."""
    arrays, rest = eqx.partition(given, eqx.is_array)
    # What is on no mesh goes on it before: its cotangent would come back with an automatic one in its type.
    on_it = lambda x: jax.sharding.reshard(x, PartitionSpec()) if jax.typeof(x).sharding.mesh.empty else x  # noqa: E731
    arrays = jax.tree.map(on_it, arrays)
    like = {
        jax.tree_util.keystr(path): (jnp.shape(x), jax.typeof(x).sharding.spec)
        for path, x in jax.tree_util.tree_leaves_with_path(given["params"])
        if eqx.is_array(x)
    }

    def spec_of(path: Any, x: Any) -> PartitionSpec:
        name = path[0].name
        shape, spec = like.get(jax.tree_util.keystr(path[2 if name == "state" else 1 :]), ((), PartitionSpec()))
        return spec if shape == x.shape and name in ("params", "state") else PartitionSpec()

    inside = lambda arrays: function(eqx.combine(arrays, rest))  # noqa: E731
    try:
        out = jax.eval_shape(jax.sharding.auto_axes(inside, out_sharding=PartitionSpec()), arrays)
    except ValueError as error:
        if "context mesh" not in str(error):
            raise
        raise TypeError(
            "`loss`, or another function given to hg.train, reads an array on the mesh with explicit axes from outside, of "
            "which it cannot know that the axes are automatic inside. Pass the array through theta or the batch."
        ) from error
    specs = jax.tree_util.tree_map_with_path(spec_of, out)
    return jax.sharding.auto_axes(inside, out_sharding=specs)(arrays)


def reject_explicit(given: dict[str, Any]) -> None:
    """An error for the first array on a mesh with explicit axes, and for such a mesh in force. given: trees by name."""
    if axes := _explicit(jax.sharding.get_abstract_mesh()):
        raise TypeError(
            f"jax.set_mesh has put a mesh with explicit axes {axes} in force, under which hg.train runs and its gradients, "
            f"but no loop of the library's own: {_AUTOMATIC}"
        )
    for name, tree in given.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if axes := _explicit_axes(x):
                where = f"{name}{jax.tree_util.keystr(path)}"
                raise TypeError(
                    f"`{where}` lies on a mesh with explicit axes {axes}, which are part of its type. Put the mesh in "
                    f"force, with jax.set_mesh(mesh), around hg.train and its gradient; or {_AUTOMATIC}"
                )


def reject_explicit_mesh(name: str, mesh: Any) -> None:
    if axes := _explicit(mesh):
        raise TypeError(f"`{name}` has explicit axes {axes}, which make types: {_AUTOMATIC}")


def _explicit_axes(x: Any) -> tuple[str, ...]:
    """Of an array whose value is known; under `jax.jit` JAX keeps the types itself, and it may go well."""
    return _explicit(getattr(sharding_of(x), "mesh", None))


def _explicit(mesh: Any) -> tuple[str, ...]:
    """The names of the explicit axes of a mesh that divide anything."""
    if mesh is None or mesh.empty:
        return ()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return tuple(name for name, size, kind in axes if kind == AxisType.Explicit and size > 1)
