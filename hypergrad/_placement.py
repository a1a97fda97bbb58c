"""Where arrays lie, as far as it is known before anything is compiled.

Invariant: a value that is known is asked; of a traced one only the mesh in force tells anything.
"""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding


FEW = 2**12  # entries: of so few it does not matter that they lie on every device


def sharding_of(x: Any) -> NamedSharding | None:
    """How an array is divided over a mesh of several devices; None if it is not, or if its value is not known."""
    sharding = on_mesh(x)
    return sharding if sharding is not None and sharding.mesh.size > 1 else None


def on_mesh(x: Any) -> NamedSharding | None:
    """`sharding_of`, of an array on a mesh of one device too."""
    while isinstance(x, jax.core.Tracer) and hasattr(x, "primal"):  # of a `jax.grad` outside of `jax.jit`
        x = x.primal
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return None
    return x.sharding


def mesh_in_force() -> Any:
    """That of `jax.set_mesh`; None if it has no devices to divide among, or if a `jax.shard_map` has done so."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 or in_shard_map() else mesh


def in_shard_map() -> bool:
    """Whether each device is at work for itself."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def at_hand(x: Any) -> bool:
    """Whether this process can look at the values of all leaves: they are not traced, and no other process holds a part."""
    leaves = jax.tree.leaves(x)
    return not any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in leaves)


def entries_here(x: Any) -> int:
    """How many entries of an array one device has; all of them where it is not known how they are divided."""
    sharding = sharding_of(x)
    return int(x.size) if sharding is None else math.prod(sharding.shard_shape(x.shape))


def may_be_divided(x: Any, elsewhere: bool = False) -> bool:
    """Whether the entries of an array are on several devices: for certain, or, of a traced one, perhaps. elsewhere: or may
    be so where the same is computed on other devices: the answer does not depend on how many there are here."""
    sharding = sharding_of(x)
    if sharding is not None and not sharding.is_fully_replicated:
        return True
    if elsewhere:
        return int(x.size) > FEW
    if sharding is not None:
        return False
    if not isinstance(x, jax.core.Tracer) or jax.device_count() == 1:
        return False
    return mesh_in_force() is not None or x.size > FEW
