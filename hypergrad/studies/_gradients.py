"""`report_gradient`: the derivatives of a trial's value, checked and kept with the trial."""

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial

from hypergrad._described import describe_hypers
from hypergrad.hypers import Domain, describe, is_domain, split_fixed
from hypergrad.studies import _marks
from hypergrad.studies._descent import Axes
from hypergrad.studies._trees import elements_of


Space = Literal["natural", "unconstrained"]


def report_gradient(trial: Any, grads: Mapping[str, Any], space: Space = "natural") -> None:
    """Keep d value / dx of the suggested values with the trial, for `HypergradientSampler` to follow.

    grads: {name of a suggested float: derivative}, and, after `suggest_tree`, the gradient of that tree beside or instead.
    What `hg.hypergradient` returns fits: a domain (`hg.positive`, ...) holds du of its own coordinates and is converted. A
    bare number is dx if space is "natural", else du of the sampler's coordinates: log x for `log=True`, the logit of the
    place in the interval for others. Parameters that are left out have no gradient. `hg.fixed` leaves are passed over.

    A wrong shape, NaN or infinity: the trial is kept, its gradient ignored, with one warning. TypeError for what is no real
    number, ValueError for a name that the trial did not suggest and for several objectives. Called again in a trial, it
    adds what is new and replaces the rest. A trial without a study (`optuna.trial.FixedTrial`): no effect.
    """
    if not isinstance(trial, optuna.trial.Trial):
        return
    if len(trial.study.directions) > 1:
        raise ValueError(f"`report_gradient` is for one objective; the study has {len(trial.study.directions)}.")
    if space not in ("natural", "unconstrained"):
        raise ValueError(f'`space` is "natural" or "unconstrained"; got {space!r}.')
    so_far = trial.storage.get_trial(trial._trial_id)  # `trial.params` would be a deep copy at each look
    tree = _marks.read_tree(so_far.system_attrs)
    numbers, of_tree = _divided(so_far, grads, tree)
    try:
        names, derivatives = tuple(numbers), _derivatives(so_far, numbers, space)
        gradient = _marks.Gradient(names, derivatives, _elements(of_tree, tree))
        _check_finite(gradient)
        gradient = _beside(gradient, _marks.read_gradient(so_far))
    except _Unusable as problem:
        warnings.warn(f"trial {trial.number}: its gradient is ignored: {problem}", stacklevel=2)
        return
    _marks.write_gradient(trial.storage, trial._trial_id, gradient)


def _beside(gradient: _marks.Gradient, before: _marks.Gradient | None) -> _marks.Gradient:
    """With what the trial has reported before, of other numbers or of the tree."""
    if before is None:
        return gradient
    numbers = dict(zip(before.names, before.numbers, strict=True)) | dict(zip(gradient.names, gradient.numbers, strict=True))
    tree = gradient.tree if gradient.tree.size else before.tree
    return _marks.Gradient(tuple(numbers), np.array(list(numbers.values()), np.float64), tree)


class _Unusable(Exception):
    """A gradient that cannot be followed, while its trial is as good as any."""


def _divided(trial: FrozenTrial, grads: Any, tree: _marks.Tree | None) -> tuple[dict[str, Any], Any]:
    """(derivatives of suggested numbers by name, the gradient of the suggested tree or None)."""
    suggested = trial.distributions
    if not isinstance(grads, Mapping):
        if tree is None:
            cure = " Give names: dict(zip(names, grads))." if isinstance(grads, (tuple, list)) else ""
            raise ValueError(f"`grads` must be {{name: derivative}}; got {type(grads).__name__}.{cure}")
        return {}, grads
    grads = {name: g for name, g in grads.items() if not (is_domain(g) and g.kind == "fixed")}
    numbers = {name: g for name, g in grads.items() if name in suggested}
    rest = {name: g for name, g in grads.items() if name not in suggested}
    known = _heads(tree.leaves) if tree is not None else set()
    unknown = [name for name in rest if _heads(describe_hypers({name: rest[name]})) - known]
    if unknown:
        raise ValueError(
            f"trial {trial.number} suggested no {', '.join(map(repr, unknown))}; it suggested "
            f"{', '.join(map(repr, suggested)) or 'no number'}{' and a tree' if tree else ''}. Report under those names."
        )
    for name in numbers:
        if _heads(describe_hypers({name: numbers[name]})) & known:
            raise ValueError(
                f"{name!r} is a number that trial {trial.number} suggested and a key of its tree: of which is the "
                "derivative? Give one of them another name."
            )
        if not isinstance(suggested[name], FloatDistribution):
            raise ValueError(f"{name!r} is suggested as {suggested[name]}: a gradient is of floats. Leave it out.")
    return numbers, rest or None


def _heads(leaves: Mapping[str, str]) -> set[str]:
    """The first keys of paths: "['a']['b']" -> "['a']"."""
    return {path.partition("]")[0] for path in leaves}


def _derivatives(trial: FrozenTrial, numbers: dict[str, Any], space: Space) -> np.ndarray:
    """d value / dx, float64 [names]."""
    found = np.empty(len(numbers))
    for i, (name, given) in enumerate(numbers.items()):
        leaves = jax.tree.leaves(given)
        if len(leaves) != 1 or np.shape(leaves[0]) != ():
            shapes = ", ".join(str(np.shape(x)) for x in leaves)
            raise _Unusable(f"{name!r} is one number, its derivative {f'of shape {shapes}' if leaves else 'None'}.")
        x, derivative = trial.params[name], _as_real(name, leaves[0])
        if is_domain(given):
            if (slope := _domain_slope(given, x)) < 0:
                raise _Unusable(f"{name!r} is {x:.6g}, which is not in the domain of its derivative, hg.{given.kind}.")
            derivative /= slope or np.nan
        elif space == "unconstrained":
            derivative /= float(Axes.of(trial, (name,)).slope(np.array([x]))[0]) or np.nan
        found[i] = derivative
    return found


def _as_real(name: str, x: Any) -> float:
    """A number of Python, or what any library has as one; `float` would read text, and drop an imaginary part."""
    try:
        if not (isinstance(x, (str, bytes)) or np.iscomplexobj(x)):
            return float(x)
    except (TypeError, ValueError):
        if isinstance(x, jax.core.Tracer):
            raise
    raise TypeError(f"the derivative of {name!r} must be one real number; got {describe(x)}.")


def _domain_slope(domain: Domain, x: float) -> float:
    """dx/du of the domain in whose coordinates the derivative is given, at x."""
    return x if domain.kind == "positive" else (x - domain.low) * (domain.high - x) / (domain.high - domain.low)


def _elements(grads: Any, tree: _marks.Tree | None) -> np.ndarray:
    """The gradient of the tree, float64 [elements]; empty if none was given."""
    if grads is None or tree is None:
        return np.zeros(0)
    learned, _ = split_fixed(grads)
    leaves = describe_hypers(learned)
    if leaves != tree.leaves:
        different = next(path for path in sorted({*leaves, *tree.leaves}) if leaves.get(path) != tree.leaves.get(path))
        there, here = tree.leaves.get(different, "nothing"), leaves.get(different, "nothing")
        raise _Unusable(f"the suggested tree has {there} at {different}, its gradient {here}.")
    return elements_of(learned, tree.leaves).astype(np.float64)


def _check_finite(gradient: _marks.Gradient) -> None:
    bad = [name for name, g in zip(gradient.names, gradient.numbers, strict=True) if not _representable(g)]
    bad += ["the tree"] if not _representable(gradient.tree).all() else []
    if bad:
        raise _Unusable(f"it is NaN, or beyond the range of float32, in {', '.join(map(str, bad[:5]))}.")


def _representable(x: Any) -> Any:
    """Finite as float32, which it is kept as."""
    return np.abs(x) <= np.finfo(np.float32).max
