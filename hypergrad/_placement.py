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
    while isinstance(x, jax.core.Tracer) and hasattr(x, "primal"):  # of a `jax.grad` outside of `jax.jit`
        x = x.primal
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return None
    return x.sharding if x.sharding.mesh.size > 1 else None


def mesh_in_force() -> Any:
    """That of `jax.set_mesh`; None if it has no devices to divide among."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


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
