"""Hyperparameters as arrays: every field of an optimizer, for every block, with a leading step axis.

Invariant: a prepared array has shape [steps | 1, 1.. | block's shape], and every decay among them is an exact n/d.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._placement import at_hand
from hypergrad._prefixes import hint, outline
from hypergrad._programs import owned
from hypergrad.errors import RangeError, decay_sentence
from hypergrad.exact import SMALLEST_RATIO, numerator, to_ratio
from hypergrad.hypers import describe
from hypergrad.optimizers.chain import Link
from hypergrad.optimizers.partition import Layer, Stack
from hypergrad.optimizers.statistics import MEANS, Statistics
from hypergrad.schedules import PerStep, spread


Hypers = dict[str, Array]  # of one block: {key: [steps | 1, ...]}, or of one step


class Field(NamedTuple):
    """One hyperparameter as it was given."""

    name: str  # as users call it
    values: list[Any]  # of each leaf: a number, an array, a `PerStep`, or None


def fields_of(layer: Layer, params: Any, weights: dict[str, Any]) -> dict[str, Field]:
    """{key in h: field} of a layer; weights: {name: value} of what its rule continues from."""
    own = {f: (f"{layer.path}.{f}", given) for f, given in layer.optimizer.hyperparameters().items()}
    given = own | {name: (f"state[{name!r}]", value) for name, value in weights.items()}
    return {layer.key(f): Field(name, broadcast_prefix(name, x, params)) for f, (name, x) in given.items()}


def expand(
    stack: Stack,
    fields: list[dict[str, Field]],
    leaf: int,
    path: str,
    like: Array,
    steps: int,
    axes: int,
    made: dict[Hashable, Array],
) -> Hypers:
    """The hyperparameters of a block whose first leaf this is, step axis first: {key: float [steps | 1, 1.. | its shape]}.

    axes: of the block. made: for all blocks, so that one value for many of them is one array. Raises with the field, the
    leaf's path and both shapes where one does not fit.
    """
    decays = {link.decay: link for link in stack.chain if link.decay}
    expanded = {}
    for layer, own in zip(stack.layers, fields, strict=True):
        for key, field in own.items():
            value, link = field.values[leaf], decays.get(key) if layer.is_rule else None
            form = compute_dtype(like), axes, link and (link.denominator, link.may_be_one)
            name = type(value), shared_value(value), *form
            if name not in made:
                x = _with_step_axis(f"{field.name} for params{path}", value, like, steps, link)
                if axes != like.ndim:
                    x = x.reshape(x.shape[0], *(1,) * (axes - 1), -1)
                made[name] = ratio(link, x) if link else x
            expanded[key] = made[name]
    return expanded


def shared_value(value: Any) -> Hashable:
    """Equal for two leaves only if they have the same value, and one that says nothing of their shape."""
    if isinstance(value, (bool, int, float)):
        return value
    raw, scalar = (value.values, 1) if isinstance(value, PerStep) else (value, 0)
    return id(value) if np.ndim(raw) == scalar else object()


def prepared_statistics(statistics: Statistics, steps: int) -> list[Hypers]:
    """The decay of each statistic as `prepared` gives those of links: {"decay": [steps | 1, 1.. | leaf shape]}."""
    decays = broadcast_prefix("statistics.decay", statistics.decay, statistics.values, "the statistics")
    result = []
    for decay, (path, leaf) in zip(decays, jax.tree_util.tree_leaves_with_path(statistics.values), strict=True):
        where = f"statistics.decay for statistics{jax.tree_util.keystr(path)}"
        result.append({"decay": ratio(MEANS, _with_step_axis(where, decay, leaf, steps, MEANS, "statistic"))})
    return result


def link_numerators(link: Link, h: Hypers, steps: int) -> Array:
    """The smallest numerator of a block at each step, which bounds its buffer: int64 [steps]."""
    n = numerator(h[str(link.decay)], link.denominator)
    return jnp.broadcast_to(n.reshape(n.shape[0], -1).min(axis=1, initial=link.denominator), (steps,))


def ratio(link: Link, rho: Array) -> Array:
    return to_ratio(rho, link.denominator, link.may_be_one)


def compute_dtype(leaf: Any) -> np.dtype:
    """Accumulators and hyperparameters of a leaf: its own dtype, float32 at least (n/d needs up to 24 bits)."""
    return np.promote_types(leaf.dtype, np.float32)


def concrete(x: Any) -> bool:
    """Whether no leaf is traced, so that values can be looked at."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def decay_interval(link: Link) -> tuple[float, float]:
    return max(1 / link.denominator, SMALLEST_RATIO), 1.0 if link.may_be_one else 1 - 1 / link.denominator


def first_bad_decay(link: Link, h: Hypers) -> tuple[Array, Array]:
    """(step, or -1 of one for all steps, value) where a block's traced decay first is outside its interval; of one that
    nowhere is, some step and value: int32 [], float64 []."""
    rho = h[str(link.decay)]
    rho = rho.reshape(rho.shape[0], -1)
    if not rho.size:
        return jnp.int32(-1), jnp.float64(decay_interval(link)[1])
    bad = outside(rho, *decay_interval(link))
    step = first_true(bad.any(axis=1)) if rho.shape[0] > 1 else 0
    entry = first_true(bad[step]) if rho.shape[1] > 1 else 0
    return jnp.int32(step if rho.shape[0] > 1 else -1), rho[step, entry].astype(jnp.float64)


def outside(rho: Array, lowest: Any, highest: Any) -> Array:
    """bool [...]; of what is no number, too."""
    return ~((rho >= lowest) & (rho <= highest))


def first_true(x: Array) -> Array:
    """Index of the first True, 0 if none: bool [n] -> int32 []. (`jnp.argmax` is lowered to int64 outside x64.)"""
    return jax.lax.argmax(x.astype(jnp.int32), 0, jnp.int32)


def broadcast_prefix(name: str, value: Any, params: Any, of: str = "params") -> list[Any]:
    """A pytree prefix as one value for each leaf; None where it has None."""
    is_leaf, value = lambda x: isinstance(x, PerStep), per_step_leaves(value)
    absent = object()  # None would be no leaf, as it is none of the parameters
    given = jax.tree.map(lambda x: absent if x is None else x, value, is_leaf=lambda x: is_leaf(x) or x is None)
    try:
        found = jax.tree.leaves(jax.tree.broadcast(given, params, is_leaf=is_leaf), is_leaf=is_leaf)
        return [None if x is absent else x for x in found]
    except ValueError as e:
        raise ValueError(
            f"{name} must be one value or a pytree prefix of {'`params`' if of == 'params' else of}; got the tree "
            f"{outline(value, is_leaf)} for {of} {outline(params)}.{hint(value, params)}"
        ) from e


def per_step_leaves(value: Any) -> Any:
    """A tree with `PerStep`s of single arrays."""
    is_per_step = lambda x: isinstance(x, PerStep)  # noqa: E731
    split = lambda x: jax.tree.map(PerStep, x.values) if is_per_step(x) else x  # noqa: E731
    return jax.tree.map(split, spread(value), is_leaf=is_per_step)


def _with_step_axis(where: str, value: Any, leaf: Array, steps: int, link: Link | None, owner: str = "parameter") -> Array:
    raw = value.values if isinstance(value, PerStep) else value
    if not eqx.is_array_like(raw) or not jnp.issubdtype(jnp.result_type(raw), jnp.number):
        hint = " Tabulate a schedule: hg.PerStep(jax.vmap(schedule)(jnp.arange(steps)))." if callable(raw) else ""
        raise TypeError(f"{where} must be a float or an array of floats; got {describe(raw)}.{hint}")
    if jnp.issubdtype(jnp.result_type(raw), jnp.complexfloating):
        raise TypeError(f"{where} must be real; got {describe(raw)}.")
    if link is not None and at_hand(raw):
        _check_decay(where, np.asarray(raw), compute_dtype(leaf), link, per_step=isinstance(value, PerStep))
    x = owned(raw).astype(compute_dtype(leaf))
    if isinstance(value, PerStep):
        if x.ndim == 0 or x.shape[0] != steps:
            raise ValueError(f"{where} is hg.PerStep of shape {x.shape}; its leading axis must be steps={steps}.")
        count, rest = steps, x.shape[1:]
    else:
        count, rest = 1, x.shape
    if rest not in ((), leaf.shape):
        hint = " Wrap it in hg.PerStep if its leading axis is the step." if rest[:1] == (steps,) else ""
        raise ValueError(
            f"{where} has shape {rest}; each leaf must be a scalar or have the {owner}'s own shape {leaf.shape}.{hint}"
        )
    return x.reshape(count, *(rest or (1,) * leaf.ndim))


def _check_decay(where: str, value: np.ndarray, dtype: np.dtype, link: Link, *, per_step: bool) -> None:
    """value: as it was given, which messages name; dtype: in which it is used."""
    lowest, highest = decay_interval(link)
    n = np.round(value.astype(dtype).astype(np.float64) * link.denominator) / link.denominator
    bad = ~((n >= lowest) & (n <= highest))
    if bad.any():
        index = np.unravel_index(np.argmax(bad), bad.shape)
        step = int(index[0]) if per_step else -1
        raise RangeError(decay_sentence(where, float(value[index]), step, highest))
