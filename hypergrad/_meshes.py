"""Devices at the door: meshes whose axes are explicit, as `jax.make_mesh` makes them, become automatic ones inside.

Invariant: what passes has shardings that the compiler chooses; none that JAX carries in the types of arrays.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from hypergrad._placement import on_mesh
from hypergrad._program_keys import equations


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
        shape, spec = like.get(jax.tree_util.keystr(path[2 if path[0].key == "state" else 1 :]), ((), PartitionSpec()))
        return spec if shape == x.shape else PartitionSpec()

    trees: list[Any] = []

    def inside(arrays: Any) -> tuple[dict[str, Any], list[Any]]:
        """(what may be divided, the leaves of the rest). Their tree goes with how parameters are laid out, and so with
        whether their values are known: this function alone is traced and is called."""
        out = function(eqx.combine(arrays, rest))
        leaves, tree = jax.tree.flatten(dataclasses.replace(out, params=None, state=None))
        trees[:] = [tree]
        return {"params": out.params, "state": out.state}, leaves

    with _told_of_closures("hg.train"):
        like_out, _ = jax.eval_shape(jax.sharding.auto_axes(inside, out_sharding=PartitionSpec()), arrays)
    specs = jax.tree_util.tree_map_with_path(spec_of, like_out)
    divided, leaves = jax.sharding.auto_axes(inside, out_sharding=(specs, PartitionSpec()))(arrays)
    return dataclasses.replace(jax.tree.unflatten(trees[0], leaves), **divided)


def in_automatic_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of arrays whose values are known, where axes are explicit: on the same devices with automatic ones.

    Its results lie on the mesh in force again.
    """

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        given, mesh = (args, options), jax.sharding.get_mesh() if explicit_mesh() is not None else None
        if mesh is None and not any(map(_explicit_axes, jax.tree.leaves(given))):
            return function(*args, **options)
        args, options = jax.tree.map(lambda x: _moved(x, automatic(x.sharding.mesh)) if _explicit_axes(x) else x, given)
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(automatic(mesh)):
            with _told_of_closures(f"hg.{function.__qualname__}"):
                result = function(*args, **options)
        if mesh is None:
            return result
        on_it = lambda x: (there := on_mesh(x)) is not None and there.mesh == automatic(mesh)  # noqa: E731
        return jax.tree.map(lambda x: _moved(x, mesh) if on_it(x) else x, result)

    return called


def automatic(mesh: Any) -> Any:
    """The mesh of the same devices and names whose axes are automatic."""
    if isinstance(mesh, AbstractMesh):
        return mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
    return Mesh(mesh.devices, mesh.axis_names)


def _moved(x: Any, mesh: Mesh) -> Any:
    """To a mesh of the same devices and names: no number moves."""
    return jax.device_put(x, NamedSharding(mesh, x.sharding.spec))


@contextlib.contextmanager
def _told_of_closures(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "context mesh" not in str(error):
            raise
        raise TypeError(
            f"`loss`, or another function given to {name}, reads an array on the mesh with explicit axes from outside, of "
            "which it cannot know that the axes are automatic inside. Pass the array through theta or the batch, or as an "
            "array of NumPy."
        ) from error


def reject_explicit(given: dict[str, Any]) -> None:
    """An error for the first array on a mesh with explicit axes, which is not in force. given: trees by name."""
    for name, tree in given.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if axes := _bare_axes(x, traced=name == "params"):
                where = f"{name}{jax.tree_util.keystr(path)}"
                raise TypeError(
                    f"`{where}` lies on a mesh with explicit axes {axes}, which are part of its type. Put the mesh in "
                    f"force, with jax.set_mesh(mesh), around hg.train and its gradient; or make the mesh "
                    "with automatic axes: jax.sharding.Mesh(devices, names), or axis_types=(jax.sharding.AxisType.Auto,) * "
                    "len(names) to jax.make_mesh."
                )


def _bare_axes(x: Any, traced: bool) -> tuple[str, ...]:
    """The explicit axes of an array that does not go well with them. Under `jax.jit` JAX keeps the types itself: `traced`
    parameters alone must not be divided. Nor does a mesh of one device matter to what is not."""
    if (lies := on_mesh(x)) is not None:
        return _explicit(lies.mesh) if lies.mesh.size > 1 or any(lies.spec) else ()
    kind = jax.typeof(x).sharding if traced and isinstance(x, jax.core.Tracer) else None
    return _explicit(kind.mesh) if kind is not None and any(kind.spec) else ()


def divided_by(program: Jaxpr) -> str:
    """By what of JAX's a program says itself how it lies on several devices; "" if by nothing."""
    for e in equations(program):
        to = [e.params.get("sharding"), e.params.get("dst_sharding"), *e.params.get("devices", ())]
        several = any(isinstance(x, NamedSharding) and x.mesh.size > 1 for x in to)
        if e.primitive.name == "shard_map" or (several and e.primitive.name in _DIVIDING):
            return _DIVIDING.get(e.primitive.name, "jax.shard_map")
    return ""


_DIVIDING = {
    "sharding_constraint": "jax.lax.with_sharding_constraint",
    "reshard": "jax.sharding.reshard",
    "device_put": "jax.device_put",
}


def reject_varying(inputs: Any) -> None:
    """An error inside of a `jax.shard_map` that has types say what differs between devices: those of a loop's carry may not
    change, and here constants become such arrays."""
    axes = sorted({str(name) for x in jax.tree.leaves(inputs) for name in _varying(x)})
    if axes:
        raise TypeError(
            f"hg.train inside of jax.shard_map got arrays that differ between devices along {', '.join(map(repr, axes))}. "
            "Pass check_vma=False to that jax.shard_map: then each device trains and is checked for itself."
        )


def _varying(x: Any) -> frozenset[Any]:
    kind = jax.typeof(x)
    found: frozenset[Any] = getattr(getattr(kind, "manual_axis_type", kind), "varying", getattr(kind, "vma", frozenset()))
    return found


def _explicit_axes(x: Any) -> tuple[str, ...]:
    """Of an array whose value is known; under `jax.jit` JAX keeps the types itself, and it may go well."""
    return _explicit(getattr(on_mesh(x), "mesh", None))


def _explicit(mesh: Any) -> tuple[str, ...]:
    """The names of the explicit axes of a mesh. One of a single device is in the types of arrays as well."""
    if mesh is None or mesh.empty:
        return ()
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
