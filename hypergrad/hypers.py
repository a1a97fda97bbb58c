"""Hyperparameters: a domain maps an unconstrained value onto its interval.

Invariant: `natural(positive(x)) == x` up to rounding, and every unconstrained value maps into the domain.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig
from jax import Array

from hypergrad._bounds import at_least
from hypergrad._hyper_names import hyper_path
from hypergrad._numbers import check_finite, check_numbers
from hypergrad._processes import divided, whole
from hypergrad._shown import shown
from hypergrad.batches import check_key
from hypergrad.exact import substitute
from hypergrad.schedules import has_knots, refuse_arithmetic, spread


_UNIT_MARGIN = 2.0**-16  # the smallest momentum that the exact layer represents


class Domain(eqx.Module):
    """A hyperparameter (pytree) stored unconstrained; `natural` gives what `train_fn` sees. Made by `hg.positive`, ...

    It prints what is stored, for a hypergradient has the same form and is no point of the domain.
    """

    unconstrained: Any
    kind: str = eqx.field(static=True)
    low: float = eqx.field(static=True, default=-math.inf)
    high: float = eqx.field(static=True, default=math.inf)

    def __pdoc__(self, **_: Any) -> Any:
        ends = f", {self.low:.6g}..{self.high:.6g}" if self.kind == "bounded" else ""
        stored = "" if self.kind == "fixed" else "unconstrained "
        return wadler_lindig.TextDoc(f"{self.kind}({stored}{shown(self.unconstrained)}{ends})")

    def natural(self) -> Any:
        values = spread(self.unconstrained)
        if self.kind == "fixed":
            return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if eqx.is_array(x) else x, values)
        return jax.tree.map(self._constrain, values)

    def _constrain(self, u: Array) -> Array:
        u = _as_float(u)
        low, high = self.ends(u.dtype)
        if self.kind == "positive":
            furthest = [np.nextafter(np.asarray(math.log(end), u.dtype), np.zeros((), u.dtype)) for end in (low, high)]
            return jnp.exp(substitute(u, jnp.clip(u, *furthest)))
        s = substitute(jnp.exp(jax.nn.log_sigmoid(u)), jax.nn.sigmoid(u))  # JAX's derivative, s (1 - s), loses digits near 1
        x = self.low + (self.high - self.low) * s
        return at_least(substitute(x, jnp.clip(x, low, high)), float(low))  # the sum may round to more than its ends

    def ends(self, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        """The least and the largest number of a type that the domain has."""
        if self.kind == "positive":
            info = jnp.finfo(dtype)
            return np.asarray(info.tiny, dtype), np.asarray(info.max, dtype)
        low, high = np.asarray(self.low, dtype), np.asarray(self.high, dtype)
        return (
            np.nextafter(low, high) if float(low) < self.low else low,
            np.nextafter(high, low) if float(high) > self.high else high,
        )

    def close(self, values: np.ndarray, dtype: Any) -> list[tuple[str, float, np.ndarray]]:
        """(which end, where it is, which values are close to it)."""
        low, high = map(float, self.ends(dtype))
        if self.kind == "positive":
            return [("lower", low, values < 4 * low), ("upper", high, values > high / 4)]
        margin = 2.0**-12 * (high - low)
        return [("lower", low, np.abs(values - low) < margin), ("upper", high, np.abs(values - high) < margin)]


refuse_arithmetic(Domain, "is stored unconstrained", "`hg.natural(hypers)` gives the numbers, as `train_fn` gets them")


def positive(x: Any) -> Domain:
    """x = exp(u), x > 0: learning rates, scales, penalties. float leaves of any shape, strictly positive. Whatever finite u
    is, x is a normal number of its type."""
    _reject_domains("positive", x)
    _check_leaves("positive", x, lambda v: (v > 0) & np.isfinite(v), "finite and > 0")
    return _representable(x, Domain(jax.tree.map(lambda v: jnp.log(_as_float(v)), x), "positive"), 0, math.inf)


def unit_interval(x: Any) -> Domain:
    """x = 2^-16 + (1 - 2^-15) sigmoid(u), in [2^-16, 1 - 2^-16]: momenta and decays, exactly what they can represent; in 16
    bits as far as these go."""
    return _interval("unit_interval", x, _UNIT_MARGIN, 1 - _UNIT_MARGIN)


def bounded(x: Any, low: float, high: float) -> Domain:
    """x = low + (high - low) sigmoid(u), low <= x <= high; what is given must lie between them."""
    low, high = (float(x) if _is_known_scalar(x) else x for x in (low, high))
    for end, value in (("low", low), ("high", high)):
        if not isinstance(value, numbers.Real):
            raise TypeError(
                f"hg.bounded: `{end}` must be a Python float, one for all entries and not traced; got {describe(value)}. "
                "Intervals that differ: a domain for each leaf, or scale what hg.unit_interval gives."
            )
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"hg.bounded needs finite low < high; got low={low!r}, high={high!r}.")
    return _interval("bounded", x, float(low), float(high))


def fixed(x: Any) -> Domain:
    """x itself, not learned: its hypergradient is zero and `hg.optimize` leaves it alone. Any leaves."""
    _reject_domains("fixed", x)
    return Domain(jax.tree.map(lambda v: jnp.asarray(v) if isinstance(v, (bool, int, float)) else v, x), "fixed")


def natural(hypers: Any) -> Any:
    """`hypers` in natural units: domains replaced by their values, `hg.knots` by `hg.PerStep`, bare leaves as they are."""
    return spread(jax.tree.map(lambda x: x.natural() if is_domain(x) else x, hypers, is_leaf=is_domain))


def at_bounds(hypers: Any) -> tuple[str, ...]:
    """Which hyperparameters have come close to an end of their interval: a sentence each, none: (). Concrete values only,
    and none of what is divided among processes.

    Close is 2^-12 of the interval's width: from there the sigmoid has hardly a slope left to come back by.
    """
    found = []
    for path, domain in jax.tree_util.tree_leaves_with_path(hypers, is_leaf=is_domain):
        if not is_domain(domain) or domain.kind == "fixed":
            continue
        for inner, x in jax.tree_util.tree_leaves_with_path(domain.natural()):
            if divided(x):  # a process may ask alone
                continue
            values, where = np.asarray(x, np.float64), "hypers" + hyper_path((*path, *inner))
            for name, bound, near in domain.close(values, x.dtype):
                if count := int(np.sum(near)):
                    of = f"{count} of {values.size} values are" if values.size > 1 else "is"
                    found.append(f"{where}: {of} at the {name} bound {bound:.6g}")
    return tuple(found)


def is_domain(x: Any) -> bool:
    return isinstance(x, Domain)


def split_fixed(hypers: Any) -> tuple[Any, Any]:
    """(learned, fixed): the same tree twice, None where the leaf belongs to the other; `eqx.combine` joins them."""

    def spec(x: Any) -> Any:
        learned = not (is_domain(x) and x.kind == "fixed")
        return jax.tree.map(lambda _: learned, x)

    return eqx.partition(hypers, jax.tree.map(spec, hypers, is_leaf=is_domain))


def scatter(hypers: Any, key: Array, scale: float = 1.0) -> Any:
    """u + scale N(0, 1) in unconstrained coordinates: another start, for `hg.restarts`. What is `hg.fixed` stays."""
    if not eqx.is_array_like(scale) or jnp.ndim(scale) or not _is_real(scale):
        raise TypeError(f"`scale` of hg.scatter must be one real number; got {describe(scale)}.")
    learned, fixed_ = split_fixed(check_hypers(hypers))
    leaves, tree = jax.tree.flatten(learned)
    keys = jax.random.split(check_key(key), len(leaves))
    moved = [x + scale * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return eqx.combine(jax.tree.unflatten(tree, moved), fixed_)


def check_hypers(hypers: Any) -> Any:
    """`hypers` with its learned leaves as arrays; an error that names the path of the first that is not a float."""
    if not jax.tree.leaves(hypers):
        raise ValueError("`hypers` is empty: there is nothing to learn. Pass a pytree of float leaves or domains.")
    check_numbers("hypers", hypers)
    learned, fixed_ = split_fixed(hypers)
    if not jax.tree.leaves(learned):
        raise ValueError("every leaf of `hypers` is hg.fixed: there is nothing to learn.")

    def convert(path: Any, leaf: Any) -> Array:
        if not _is_real(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"hypers{hyper_path(path)} is {describe(leaf)}; a hyperparameter is a float. "
                "Write 1.0 for 1, or wrap what is not learned in hg.fixed(...)."
            )
        check_finite(f"hypers{hyper_path(path)}", leaf)
        return _as_float(leaf)

    return eqx.combine(jax.tree_util.tree_map_with_path(convert, learned), fixed_)


def describe(leaf: Any) -> str:
    """A leaf in an error: `int32[3]`, `the class SGD itself`, or the type's name."""
    if isinstance(leaf, type):
        return f"the class {leaf.__name__} itself"
    if eqx.is_array_like(leaf) and hasattr(leaf, "dtype"):
        return f"{leaf.dtype.name}{list(leaf.shape)}"
    return f"{type(leaf).__name__} {leaf!r}" if isinstance(leaf, (int, complex, str)) else type(leaf).__name__


def _interval(name: str, x: Any, low: float, high: float) -> Domain:
    _reject_domains(name, x)
    _check_leaves(name, x, lambda v: (v > low) & (v < high), f"strictly between {low:.6g} and {high:.6g}")

    def unconstrain(v: Any) -> Array:
        p = (_as_float(v) - low) / (high - low)
        return jnp.log(p) - jnp.log1p(-p)

    return _representable(x, Domain(jax.tree.map(unconstrain, x), name, low, high), low, high)


def _representable(x: Any, domain: Domain, low: float, high: float) -> Domain:
    """The domain, whose values must still be strictly inside of it once they are stored."""
    # At knots, what is given is what the domain holds; between them it is not: they spread in its own coordinates.
    pairs = [(v, domain._constrain(u)) for v, u in zip(*map(jax.tree.leaves, (x, domain.unconstrained)), strict=True)]
    if has_knots(x):
        pairs += [(v, v) for v in jax.tree.leaves(domain.natural())]
    for value, stored in pairs:
        if isinstance(stored, jax.core.Tracer):
            continue
        least, most = map(float, domain.ends(stored.dtype))
        given = whole(value).astype(np.float64)
        apart = np.abs(whole(stored).astype(np.float64) - given)
        moved = (domain.kind == "positive") & ((apart > given / 2) | (given < least))
        inside = whole((stored > low) & (stored < high)) & ~moved
        if inside.all():
            continue
        bad = whole(value).reshape(-1)[int(np.argmin(inside))]
        first, last = (least, most) if domain.kind == "positive" else (low, high)
        raise ValueError(
            f"hg.{domain.kind}: {bad!s} cannot be told from an end of ({first:.6g}, {last:.6g}) in {stored.dtype.name}: "
            "take a value further inside, or a longer type (float32, or float64 by jax.enable_x64)."
        )
    return domain


def _reject_domains(name: str, x: Any) -> None:
    """Whose stored value would pass for one in natural units; and numbers that JAX would read as others."""
    check_numbers(f"hg.{name}", x)
    for path, leaf in jax.tree_util.tree_leaves_with_path(x, is_leaf=is_domain):
        if is_domain(leaf):
            raise TypeError(
                f"hg.{name}{jax.tree_util.keystr(path)} is a domain already, {leaf!r}: a hyperparameter has one. Choose "
                "one, or give the value in natural units, hg.natural(...)."
            )


def _check_leaves(name: str, x: Any, inside: Callable[[Any], Any], condition: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        where = f"hg.{name}: leaf {jax.tree_util.keystr(path)}".removesuffix("leaf ").removesuffix(": ")
        if not _is_real(leaf):
            raise TypeError(f"{where} is {describe(leaf)}; a hyperparameter is a float or an array of floats.")
        if isinstance(leaf, jax.core.Tracer):
            continue  # the value is unknown until it runs; log of it is NaN then, which is reported
        values = whole(leaf)
        bad = ~np.asarray(inside(values.astype(np.float64)))
        if bad.any():
            index = np.unravel_index(np.argmax(bad), bad.shape)
            at = f" at index {tuple(int(i) for i in index)}" if bad.ndim else ""
            cure = " An array that reaches an end: clip it to values inside." if bad.ndim else ""
            raise ValueError(f"{where} must be {condition}; got {values[index]!s}{at}.{cure}")


def _is_real(leaf: Any) -> bool:
    return eqx.is_array_like(leaf) and not jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating)


def _is_known_scalar(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray)) and not isinstance(x, jax.core.Tracer) and not x.ndim and _is_real(x)


def _as_float(x: Any) -> Array:
    dtype = jnp.result_type(x if jnp.issubdtype(jnp.result_type(x), jnp.floating) else float)
    return jnp.array(x, dtype)  # an explicit dtype is never weak: updates keep it, so that nothing compiles twice
