"""Hyperparameters as arrays: every field of an optimizer, for every parameter leaf, with a leading step axis.

Invariant: a prepared array has shape [steps | 1, 1.. | leaf shape], and every decay among them is an exact n/d.
"""

import functools
from collections.abc import Hashable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._prefixes import hint, outline
from hypergrad._programs import owned
from hypergrad.errors import RangeError, decay_sentence
from hypergrad.exact import (
    DEFERRED,
    DEVICE,
    GMPY2,
    GMPY2_DEFERRED,
    SMALLEST_RATIO,
    InformationBuffer,
    default_fraction_bits,
    known_numerator,
    numerator,
    to_ratio,
)
from hypergrad.hypers import describe
from hypergrad.optimizers.chain import Link, Optimizer
from hypergrad.optimizers.layout import Layout, separate, together
from hypergrad.optimizers.statistics import MEANS, Statistics
from hypergrad.schedules import PerStep, spread


WIDE_RANGE_BITS = 8  # sums of squares up to 2^22 for float32 parameters


def layout_of(optimizer: Optimizer, params: Any, weights: dict[str, Any] | None = None) -> Layout:
    """Small leaves of one dtype that share every hyperparameter lie side by side, if the optimizer is `entrywise`."""
    leaves = jax.tree.leaves(params)
    shapes = [x.shape for x in leaves]
    if not optimizer.entrywise:
        return separate(shapes)
    columns = [_broadcast_prefix(name, given, params) for _, _, name, given in _fields(optimizer, weights)]  # held: by id
    keys = [(x.dtype, *(_shared(column[i]) for column in columns)) for i, x in enumerate(leaves)]
    return together(shapes, keys)


def _shared(value: Any) -> Hashable:
    """Equal for two leaves only if they have the same value, and one that says nothing of their shape."""
    if isinstance(value, (bool, int, float)):
        return value
    raw, scalar = (value.values, 1) if isinstance(value, PerStep) else (value, 0)
    return id(value) if np.ndim(raw) == scalar else object()


def expand(
    optimizer: Optimizer, params: Any, steps: int, layout: Layout, weights: dict[str, Any] | None = None
) -> list[dict[str, Array]]:
    """The hyperparameters of each vector of the layout, step axis first: {key: float [steps | 1, 1.. | vector's shape]}.

    The keys are those of `Optimizer.key`. Raises with the field, the leaf's path and both shapes where one does not fit.
    """
    leaves = layout.first(jax.tree_util.tree_leaves_with_path(params))
    expanded: list[dict[str, Array]] = [{} for _ in leaves]
    decays = {link.decay: link for link in optimizer.chain if link.decay}
    for layer, field, name, given in _fields(optimizer, weights):
        key = layer.key(field)
        link = decays.get(field) if layer is optimizer.layers[-1] else None
        values = layout.first(_broadcast_prefix(name, given, params))
        for h, value, (path, leaf) in zip(expanded, values, leaves, strict=True):
            where = f"{name} for params{jax.tree_util.keystr(path)}"
            x = _with_step_axis(where, value, leaf, steps, link)
            x = x.reshape(x.shape[0], -1) if layout.flat else x
            h[key] = _ratio(link, x) if link else x
    return expanded


def _fields(optimizer: Optimizer, weights: dict[str, Any] | None) -> list[tuple[Optimizer, str, str, Any]]:
    """Every hyperparameter: its layer, its field there, what users call it, its value; then the weights in `state`."""
    layers = [(f"optimizer.{'inner.' * depth}", layer) for depth, layer in enumerate(optimizer.layers)]
    own = [(x, field, f"{at}{field}", given) for at, x in layers for field, given in x.hyperparameters().items()]
    return own + [(optimizer.layers[-1], name, f"state[{name!r}]", given) for name, given in (weights or {}).items()]


def weights_after(optimizer: Optimizer, weights: dict[str, Any], steps: int) -> dict[str, Any]:
    """What `Optimizer.weights` come to, of the form of their decays without steps; weights: those that a run began with."""
    rule = optimizer.layers[-1]
    links = {link.decay: link for link in rule.chain if link.decay}
    is_per_step = lambda x: isinstance(x, PerStep)  # noqa: E731

    def after(decay: str, rho: Any, before: Any) -> Array:
        per_step = is_per_step(rho)
        x = owned(rho.values if per_step else rho)
        x = _ratio(links[decay], x.astype(jnp.promote_types(x.dtype, jnp.float32)))
        product = jnp.prod(x, axis=0) if per_step else x**steps
        return before + (1 - before) * (1 - product)

    found = {}
    for name, decay in rule.weights.items():
        rho, before = _per_step_leaves(getattr(rule, decay)), weights.get(name, 0.0)
        try:
            before = jax.tree.broadcast(before, jax.tree.map(lambda _: 0, rho, is_leaf=is_per_step))
        except ValueError:
            rho = jax.tree.broadcast(rho, before, is_leaf=is_per_step)
        found[name] = jax.tree.map(functools.partial(after, decay), rho, before, is_leaf=is_per_step)
    return found


def prepared(
    optimizer: Optimizer, params: Any, steps: int, layout: Layout, weights: dict[str, Any] | None = None
) -> tuple[list[dict[str, Array]], frozenset[str]]:
    """`expand` followed by the `prepare` of each layer, the rule's first, with every decay an exact n/d; and the decays that
    are fields still, as they were given."""
    decays = {link.decay: link for link in optimizer.chain if link.decay}
    result, given = [], frozenset(decays)
    for fields in expand(optimizer, params, steps, layout, weights):
        h = fields
        for layer in reversed(optimizer.layers):
            h = prepare(layer, h, steps)
        given &= {name for name in decays if h[name] is fields.get(name)}
        result.append({**h, **{name: _ratio(link, h[name]) for name, link in decays.items() if name not in given}})
    return result, given


def prepare(layer: Optimizer, h: dict[str, Array], steps: int) -> dict[str, Array]:
    """`layer.prepare`, which must give every decay its value."""
    found, name = layer.prepare(h, steps), type(layer).__name__
    if not isinstance(found, dict):
        raise TypeError(f"{name}.prepare must return a dict, {{**h, ...}} of what it got and adds; got {describe(found)}.")
    for link in layer.chain:
        if layer is layer.layers[-1] and link.decay and link.decay not in found:
            raise TypeError(
                f"{name}, link `{link.name}`: its decay is called {link.decay!r}, and no hyperparameter is, nor anything "
                f"that `prepare` returns. There are: {', '.join(found)}."
            )
    return found


def prepared_statistics(statistics: Statistics, steps: int) -> list[dict[str, Array]]:
    """The decay of each statistic as `prepared` gives those of links: list of {"decay": [steps | 1, 1.. | leaf shape]}."""
    decays = _broadcast_prefix("statistics.decay", statistics.decay, statistics.values, "the statistics")
    result = []
    for decay, (path, leaf) in zip(decays, jax.tree_util.tree_leaves_with_path(statistics.values), strict=True):
        where = f"statistics.decay for statistics{jax.tree_util.keystr(path)}"
        result.append({"decay": _ratio(MEANS, _with_step_axis(where, decay, leaf, steps, MEANS, "statistic"))})
    return result


def link_numerators(link: Link, h: dict[str, Array], steps: int) -> Array:
    """The smallest numerator of a leaf at each step, which bounds its buffer: int64 [steps]."""
    n = numerator(h[link.decay], link.denominator)  # type: ignore[index]
    return jnp.broadcast_to(n.reshape(n.shape[0], -1).min(axis=1, initial=link.denominator), (steps,))


def buffers(
    chain: tuple[Link, ...], h: list[dict[str, Array]], unbounded: bool = False
) -> tuple[tuple[InformationBuffer | None, ...], ...]:
    """Where the digits of each link and leaf go, on the device or in integers without bounds."""
    return tuple(tuple(_buffer(hj[link.decay], unbounded) if link.decay else None for hj in h) for link in chain)


def _buffer(rho: Any, unbounded: bool = False) -> InformationBuffer:
    """A decay that all entries of a leaf share can wait: [steps | 1, ...]."""
    if rho.size == rho.shape[0]:
        return GMPY2_DEFERRED if unbounded else DEFERRED
    return GMPY2 if unbounded else DEVICE


def known_numerators(link: Link, decay: Any, tree: Any, steps: int) -> list[tuple[np.ndarray, InformationBuffer]]:
    """`link_numerators` of a decay whose values are known, without a program: int64 [steps] for every leaf of the tree, and
    the buffer that they are of."""
    result = []
    for value, leaf in zip(_broadcast_prefix(str(link.decay), decay, tree), jax.tree.leaves(tree), strict=True):
        rho = np.asarray(value.values if isinstance(value, PerStep) else [value], compute_dtype(leaf))
        n = known_numerator(rho, link.denominator)
        least = n.reshape(n.shape[0], -1).min(axis=1, initial=link.denominator)
        result.append((np.broadcast_to(least, (steps,)), _buffer(rho)))
    return result


def link_fraction_bits(link: Link, leaf: Array, fraction_bits: int | None) -> int:
    """Of the high limb where the link is wide: 8 less there, and 46 more below it."""
    bits = default_fraction_bits(leaf.dtype) if fraction_bits is None else fraction_bits
    return bits - WIDE_RANGE_BITS if link.wide else bits


def _ratio(link: Link, rho: Array) -> Array:
    return to_ratio(rho, link.denominator, link.may_be_one)


def compute_dtype(leaf: Array) -> np.dtype:
    """Accumulators and hyperparameters of a leaf: its own dtype, float32 at least (n/d needs up to 24 bits)."""
    return np.promote_types(leaf.dtype, np.float32)


def concrete(x: Any) -> bool:
    """Whether no leaf is traced, so that values can be looked at."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def decay_interval(link: Link) -> tuple[float, float]:
    return max(1 / link.denominator, SMALLEST_RATIO), 1.0 if link.may_be_one else 1 - 1 / link.denominator


def first_bad_decay(link: Link, h: dict[str, Array]) -> tuple[Array, Array, Array]:
    """(any, step, value): where a leaf's traced decay is outside its interval."""
    rho = h[link.decay].reshape(h[link.decay].shape[0], -1)  # type: ignore[index]
    if not rho.size:
        return jnp.bool_(False), jnp.int32(-1), jnp.float32(0)
    lowest, highest = decay_interval(link)
    bad = ~((rho >= lowest) & (rho <= highest))
    step = first_true(bad.any(axis=1))
    step_or_none = jnp.where(rho.shape[0] > 1, step, -1).astype(jnp.int32)
    return bad.any(), step_or_none, rho[step, first_true(bad[step])].astype(jnp.float32)


def first_true(x: Array) -> Array:
    """Index of the first True, 0 if none: bool [n] -> int32 []. (`jnp.argmax` is lowered to int64 outside x64.)"""
    return jax.lax.argmax(x.astype(jnp.int32), 0, jnp.int32)


def _broadcast_prefix(name: str, value: Any, params: Any, of: str = "params") -> list[Any]:
    is_per_step, value = lambda x: isinstance(x, PerStep), _per_step_leaves(value)
    try:
        return jax.tree.leaves(jax.tree.broadcast(value, params, is_leaf=is_per_step), is_leaf=is_per_step)
    except ValueError as e:
        raise ValueError(
            f"{name} must be one value or a pytree prefix of {'`params`' if of == 'params' else of}; got the tree "
            f"{outline(value, is_per_step)} for {of} {outline(params)}.{hint(value, params)}"
        ) from e


def _per_step_leaves(value: Any) -> Any:
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
    if link is not None and concrete(raw):
        _check_decay(where, np.asarray(raw), link, per_step=isinstance(value, PerStep))
    x = owned(raw).astype(compute_dtype(leaf))
    if isinstance(value, PerStep):
        if x.ndim == 0 or x.shape[0] != steps:
            raise ValueError(f"{where} is hg.PerStep of shape {x.shape}; its leading axis must be steps={steps}.")
        rest = x.shape[1:]
    else:
        x, rest = x[None], x.shape
    if rest not in ((), leaf.shape):
        hint = " Wrap it in hg.PerStep if its leading axis is the step." if rest[:1] == (steps,) else ""
        raise ValueError(
            f"{where} has shape {rest}; each leaf must be a scalar or have the {owner}'s own shape {leaf.shape}.{hint}"
        )
    return x.reshape(x.shape[0], *(rest or (1,) * leaf.ndim))


def _check_decay(where: str, value: np.ndarray, link: Link, *, per_step: bool) -> None:
    lowest, highest = decay_interval(link)
    n = np.round(value.astype(np.float64) * link.denominator) / link.denominator
    bad = ~((n >= lowest) & (n <= highest))
    if bad.any():
        index = np.unravel_index(np.argmax(bad), bad.shape)
        step = int(index[0]) if per_step else -1
        raise RangeError(decay_sentence(where, float(value[index]), step, highest))
