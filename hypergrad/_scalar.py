"""What a user's function makes of a trained run: one number.

Invariant: what is returned is a real float without axes.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from hypergrad._door import calling


def real_scalar(name: str, function: Callable[[Any], Array], trained: Any) -> Array:
    """function(trained), checked. name: of the function."""
    with calling(f"{name}(trained)", trained):
        value = function(trained)
    if not eqx.is_array_like(value):
        raise TypeError(f"`{name}` must return one real float; got {type(value).__name__}. Return the number alone.")
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`{name}` must return one real float; got {dtype.name}{list(shape)}. Take its mean or sum.")
    return jnp.asarray(value)
