"""Whether a loss is a mean over the examples of its batch: the whole batch's beside those of its examples, one at a time.

Invariant: values and slopes are compared. Values alone coincide where all examples have the same loss, or none: at a head of
zeros those of any weighted mean do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad import _programs as programs
from hypergrad.curvature._passes import wide


class Compared(NamedTuple):
    """unit: the relative one of the loss's dtype."""

    whole: float  # of the batch
    apart: float  # mean over its examples, one at a time
    size: float  # mean over their magnitudes
    unit: float

    @property
    def off(self) -> float:
        return abs(self.whole - self.apart)

    def allowed(self, size: float) -> float:
        """What rounding makes of numbers of this size, and more."""
        return max(1e-3, 4 * self.unit) * size

    @property
    def differs(self) -> bool:
        """Also where an example alone gives no number, and the batch does."""
        return np.isfinite(self.whole) and not (np.isfinite(self.apart) and self.off <= self.allowed(self.size))


def check_mean(loss: Any, params: Any, theta: Any, batch: Any, constants: list[Any]) -> None:
    """A loss of examples that see each other has no example's gradient. Nothing is said where values are not concrete."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((constants, params, theta, batch))):
        return
    told = no_mean(loss, params, theta, batch)
    if told is not None:
        raise ValueError(told)


def no_mean(loss: Any, params: Any, theta: Any, batch: Any, where: str = "") -> str | None:
    """What there is to say of a loss that is no mean over the examples of `batch`. where: what is said of the numbers.

    Near a minimum, where a loss or its slope is small, rounding alone may make such a difference: one as small as that is
    looked at again with other parameters, where there is none. What rounding makes of a loss of 16 bits is a difference of
    that dtype's.
    """
    with jax.ensure_compile_time_eval():
        elsewhere = jax.tree.map(lambda x, u: jnp.asarray(x) + u * (1 + jnp.abs(x)) / 2, params, _signs(params))
        found = _values(loss, params, theta, batch)
        if found.differs and found.off <= found.allowed(found.size) + max(1e-6, 8 * found.unit):
            found = _values(loss, elsewhere, theta, batch)
        if found.differs:
            return _told(where, "", found)
        for name in ("params", "theta"):
            slope = _slopes(name, loss, params, theta, batch, found.unit)
            if slope is None or not slope.differs:
                continue
            far = _slopes(name, loss, elsewhere, theta, batch, found.unit)
            if far is None or far.differs or not slope.off <= far.allowed(far.size):
                return _told(where, f" of its slope in `{name}` along random signs,", slope)
    return None


def _told(where: str, what: str, found: Compared) -> str:
    return (
        f"`loss` is no mean over the examples of `batch`:{where}{what} the whole batch gives {found.whole:.7g}, and its "
        f"examples one at a time {found.apart:.7g} on average. If it takes a sum, divide by the number of examples, also in "
        "place of a sum of weights or of a mask; give what belongs to one example, as its weight, as a leaf of `batch`; if "
        "examples see each other, as in batch normalization, hold the batch's statistics fixed."
    )


def _values(loss: Any, params: Any, theta: Any, batch: Any) -> Compared:
    return _compared(lambda b: loss(params, theta, b), batch, None)


def _slopes(name: str, loss: Any, params: Any, theta: Any, batch: Any, unit: float) -> Compared | None:
    """The same of the loss's derivative as these leaves move along random signs. None: it has none, in either mode."""
    given = {"params": params, "theta": theta}
    signs = _signs(given[name])
    if not any(np.size(u) for u in jax.tree.leaves(signs)):
        return None

    def moved(s: Array, b: Any) -> Array:
        along = jax.tree.map(lambda u, x: x if u is None else x + (s * u).astype(u.dtype), signs, given[name], is_leaf=_none)
        return loss(*{**given, name: along}.values(), b)

    zero = jnp.zeros(())
    modes: list[Callable[[Any], Array]] = [  # a `jax.custom_vjp` has reverse mode alone
        lambda b: jax.jvp(lambda s: moved(s, b), (zero,), (jnp.ones(()),))[1],
        lambda b: jax.grad(lambda s: moved(s, b))(zero),
    ]
    for slope in modes:
        try:
            return _compared(slope, batch, unit)
        except (TypeError, ValueError, NotImplementedError):
            continue
    return None  # whoever differentiates in these leaves is told by JAX; who does not needs no slope


def _compared(function: Callable[[Any], Array], batch: Any, unit: float | None) -> Compared:
    def numbers(batch: Any) -> tuple[Array, Array, Array]:
        apart = wide(jax.vmap(function)(jax.tree.map(lambda x: x[:, None], batch)))
        return function(batch), jnp.mean(apart), jnp.mean(jnp.abs(apart))

    found = programs.apart(numbers, jax.tree.map(jnp.asarray, batch))  # found again for equal programs
    own = float(jnp.finfo(jnp.result_type(found[0].dtype, 0.0)).eps) if unit is None else unit
    whole, mean, size = map(float, found)
    return Compared(whole, mean, size, own)


def _signs(tree: Any) -> Any:
    """Random signs like each float; None for what is none."""
    random = np.random.default_rng(0)

    def like(x: Any) -> Array | None:
        dtype = jnp.result_type(x)
        signs = random.choice([-1.0, 1.0], jnp.shape(x))
        return jnp.asarray(signs, dtype) if jnp.issubdtype(dtype, jnp.inexact) else None

    return jax.tree.map(like, tree)


def _none(x: Any) -> bool:
    return x is None
