"""An optimizer as a chain of leaky links: z_k <- rho_k z_k + increment_k for k = 1..K, the last link being the parameters.

Invariant: increment_k reads nothing that undoing the links K..k in that order has not recovered. So it may read the NEW
values of links before k, the OLD values of links after k, the hyperparameters of the step, and the gradient at the old
parameters; the last link may not read the gradient (it is recomputed only once the parameters are back).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.errors import RangeError, decay_sentence
from hypergrad.exact import MOMENTUM_DENOMINATOR, default_fraction_bits, numerator, to_ratio
from hypergrad.hypers import PerStep, describe


PARAMS = "params"


class Link(NamedTuple):
    """z <- rho z + increment, for one leaf of the parameters.

    increment(h, z, g): h.<hyperparameter> at this step, z.<link> other links' values, g the gradient; arrays that
    broadcast against the leaf. The link called "params" is last and takes (h, z). End it in a product or a quotient,
    not in a product plus a sum: compilers contract those differently in different programs.
    """

    name: str
    increment: Callable[..., Array]
    decay: str | None = None  # the hyperparameter (or `prepare`d value) that is rho; None: rho = 1, nothing is lost
    denominator: int = MOMENTUM_DENOMINATOR  # d of rho = n/d, a power of two up to 2^24
    may_be_one: bool = False  # whether rho = 1 (nothing decays) makes sense here
    start: Callable[[Array], Array] = jnp.zeros_like  # parameter leaf -> initial value, and so the link's shape
    extra_bits: int = 0  # fraction bits beyond the parameters' (second moments are small)


class View:
    """Values by attribute, as an increment reads them; what it may not read is an error that says why."""

    def __init__(self, values: Mapping[str, Any], owner: str) -> None:
        self.__dict__.update(values)
        self.__dict__["_owner"] = owner

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(k for k in self.__dict__ if k != "_owner")
        raise AttributeError(
            f"the increment of link `{self._owner}` reads `{name}`, which is not available to it (it has: {known}). "
            "A link's own value is never available: the increment could not be undone."
        )


class Optimizer(eqx.Module):
    """Base of reversible optimizers: dataclass fields are the hyperparameters, `chain` is the update.

    Each field is a scalar, a `PerStep`, an array of a parameter's shape, or a pytree prefix of the parameters with such
    leaves. `linear`: every gradient enters its increment linearly, with a factor made of hyperparameters alone
    (the reverse pass is then cheaper by one linearization).
    """

    chain: ClassVar[tuple[Link, ...]]
    linear: ClassVar[bool] = False

    def prepare(self, h: dict[str, Array], steps: int) -> dict[str, Array]:
        """Hyperparameters of one leaf -> what its increments read as `h`; runs once, under ordinary autodiff.

        Every array has a leading step axis of length `steps`, or 1 where it is constant, and broadcasts against
        [steps, *leaf shape]. Decays come as the exact n/d.
        """
        del steps
        return h

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "chain" in cls.__dict__:
            _check_chain(cls.__name__, cls.chain)


def _check_chain(name: str, chain: tuple[Link, ...]) -> None:
    names = [link.name for link in chain]
    if not names or names[-1] != PARAMS or len(set(names)) != len(names):
        raise TypeError(f"{name}.chain must be links with different names, the last called `params`; got {names}.")
    if len(names) == 1:
        raise TypeError(
            f"{name}.chain has only the link `params`. Its increment may not read the gradient at the parameters that it "
            "leaves, as plain SGD would: that step has no explicit inverse. Use momentum (hg.SGD)."
        )
    for link in chain:
        d = link.denominator
        if d < 2 or d > 2**24 or d & (d - 1):
            raise TypeError(f"{name}, link `{link.name}`: denominator must be a power of two from 2 to 2^24; got {d}.")


def expand(optimizer: Optimizer, params: Any, steps: int, only: tuple[str, ...] | None = None) -> list[dict[str, Array]]:
    """The hyperparameters of each parameter leaf, step axis first: list of {field: float [steps | 1, 1.. | leaf shape]}.

    Raises with the field, the leaf's path and both shapes where one does not fit.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    expanded: list[dict[str, Array]] = [{} for _ in leaves]
    decays = {link.decay: link for link in optimizer.chain if link.decay}
    for field in dataclasses.fields(optimizer):
        if only is not None and field.name not in only:
            continue
        values = _broadcast_prefix(field.name, getattr(optimizer, field.name), params)
        for h, value, (path, leaf) in zip(expanded, values, leaves, strict=True):
            x = _with_step_axis(field.name, value, jax.tree_util.keystr(path), leaf, steps, decays)
            h[field.name] = to_ratio(x, decays[field.name].denominator) if field.name in decays else x
    return expanded


def prepared(optimizer: Optimizer, params: Any, steps: int) -> list[dict[str, Array]]:
    """`expand` followed by the optimizer's `prepare`, with every decay an exact n/d."""
    result = []
    for h in expand(optimizer, params, steps):
        h = dict(optimizer.prepare(h, steps))
        for link in optimizer.chain:
            if link.decay:
                h[link.decay] = to_ratio(h[link.decay], link.denominator)
        result.append(h)
    return result


def link_numerators(link: Link, h: dict[str, Array], steps: int) -> Array:
    """The smallest numerator of a leaf at each step, which bounds its buffer: int64 [steps]."""
    n = numerator(h[link.decay], link.denominator)  # type: ignore[index]
    return jnp.broadcast_to(n.reshape(n.shape[0], -1).min(axis=1), (steps,))


def link_fraction_bits(link: Link, leaf: Array, fraction_bits: int | None) -> int:
    bits = default_fraction_bits(leaf.dtype) if fraction_bits is None else fraction_bits
    return min(bits + link.extra_bits, 60)


def _broadcast_prefix(name: str, value: Any, params: Any) -> list[Any]:
    is_per_step = lambda x: isinstance(x, PerStep)  # noqa: E731
    value = jax.tree.map(lambda x: jax.tree.map(PerStep, x.values) if is_per_step(x) else x, value, is_leaf=is_per_step)
    try:
        return jax.tree.leaves(jax.tree.broadcast(value, params, is_leaf=is_per_step), is_leaf=is_per_step)
    except ValueError as e:
        raise ValueError(
            f"optimizer.{name} must be one value or a pytree prefix of `params`; got the tree "
            f"{jax.tree.structure(value, is_leaf=is_per_step)} for params {jax.tree.structure(params)}."
        ) from e


def _with_step_axis(name: str, value: Any, path: str, leaf: Array, steps: int, decays: dict[str, Link]) -> Array:
    where = f"optimizer.{name} for params{path}"
    raw = value.values if isinstance(value, PerStep) else value
    if not eqx.is_array_like(raw) or not jnp.issubdtype(jnp.result_type(raw), jnp.number):
        raise TypeError(f"{where} must be a float or an array of floats; got {describe(raw)}.")
    if jnp.issubdtype(jnp.result_type(raw), jnp.complexfloating):
        raise TypeError(f"{where} must be real; got {describe(raw)}.")
    if name in decays and concrete(raw):
        _check_decay(where, np.asarray(raw), decays[name], per_step=isinstance(value, PerStep))
    x = jnp.asarray(raw).astype(compute_dtype(leaf))
    if isinstance(value, PerStep):
        if x.ndim == 0 or x.shape[0] != steps:
            raise ValueError(f"{where} is hg.PerStep of shape {x.shape}; its leading axis must be steps={steps}.")
        rest = x.shape[1:]
    else:
        x, rest = x[None], x.shape
    if rest not in ((), leaf.shape):
        hint = " Wrap it in hg.PerStep if its leading axis is the step." if rest[:1] == (steps,) else ""
        raise ValueError(
            f"{where} has shape {rest}; each leaf must be a scalar or have the parameter's own shape {leaf.shape}.{hint}"
        )
    return x.reshape(x.shape[0], *(rest or (1,) * leaf.ndim))


def compute_dtype(leaf: Array) -> np.dtype:
    """Accumulators and hyperparameters of a leaf: its own dtype, float32 at least (n/d needs up to 24 bits)."""
    return np.promote_types(leaf.dtype, np.float32)


def concrete(x: Any) -> bool:
    """Whether no leaf is traced, so that values can be looked at."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def decay_interval(link: Link) -> tuple[float, float]:
    return 1 / link.denominator, 1.0 if link.may_be_one else 1 - 1 / link.denominator


def _check_decay(where: str, value: np.ndarray, link: Link, *, per_step: bool) -> None:
    lowest, highest = decay_interval(link)
    n = np.round(value.astype(np.float64) * link.denominator) / link.denominator
    bad = ~((n >= lowest) & (n <= highest))
    if bad.any():
        index = np.unravel_index(np.argmax(bad), bad.shape)
        step = int(index[0]) if per_step else -1
        raise RangeError(decay_sentence(where, float(value[index]), step, link.denominator))


def first_bad_decay(link: Link, h: dict[str, Array]) -> tuple[Array, Array, Array]:
    """(any, step, value): where a leaf's traced decay is outside its interval."""
    rho = h[link.decay].reshape(h[link.decay].shape[0], -1)  # type: ignore[index]
    lowest, highest = decay_interval(link)
    bad = ~((rho >= lowest) & (rho <= highest))
    step = first_true(bad.any(axis=1))
    return bad.any(), step, rho[step, first_true(bad[step])].astype(jnp.float32)


def first_true(x: Array) -> Array:
    """Index of the first True, 0 if none: bool [n] -> int32 []. (`jnp.argmax` is lowered to int64 outside x64.)"""
    return jax.lax.argmax(x.astype(jnp.int32), 0, jnp.int32)
