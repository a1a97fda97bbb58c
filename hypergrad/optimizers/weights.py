"""What else than links a run continues from: weights of means, such as Adam's bias corrections.

Invariant: a run that is cut in two, the second given the weights of the first, is the run.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient

from hypergrad._programs import owned
from hypergrad.exact import substitute, to_ratio
from hypergrad.hypers import describe
from hypergrad.optimizers.chain import Link, Optimizer
from hypergrad.optimizers.expand import per_step_leaves
from hypergrad.optimizers.partition import Layer
from hypergrad.schedules import PerStep


def names_of(layers: tuple[Layer, ...]) -> list[str]:
    """The entries that `state` may have for them."""
    return list(dict.fromkeys(name for layer in layers if layer.is_rule for name in layer.optimizer.weights))


def weights_of(layer: Layer, state: dict[str, Any] | None) -> dict[str, Any]:
    """Those of a layer's rule that a run begins with: under its labels, where there are partitions around it."""
    found = {}
    if layer.is_rule:
        _check_decays(layer.optimizer)
    for name in layer.optimizer.weights if layer.is_rule and isinstance(state, dict) else ():
        value = state.get(name)  # type: ignore[union-attr]
        for label in layer.labels:
            if not isinstance(value, (dict, type(None))):
                raise ValueError(
                    f"state[{name!r}] must be a dict with the labels of hg.partition, {label!r} among them, as in "
                    f"Trained.state of such a run; got {describe(value)}. Without it, the rule's means begin anew."
                )
            value = None if value is None else value.get(label)
        if value is not None:
            found[name] = value
    return found


def _check_decays(rule: Optimizer) -> None:
    """What is counted must be a field, whose decay some link has."""
    name, decays = type(rule).__name__, {link.decay for link in rule.chain}
    for entry, decay in rule.weights.items():
        if decay not in rule.hyperparameters():
            raise TypeError(
                f"{name}.weights: {entry!r} counts {decay!r}, which is no field of the rule but made by `prepare`, if at "
                "all. Only a decay that is given can be counted: make it a field."
            )
        if decay not in decays:
            raise TypeError(
                f"{name}.weights: {entry!r} counts {decay!r}, and no link of its chain decays by that. A chain of its own "
                "needs `weights` of its own: what of {entry: decay} it has, or {}."
            )


def weights_after(layers: tuple[Layer, ...], state: dict[str, Any] | None, steps: int, begin: int = 0) -> dict[str, Any]:
    """What they come to, of the form of their decays without steps. begin: the step that the derivative begins with."""
    result: dict[str, Any] = {}
    for layer in layers:
        before = weights_of(layer, state)
        for name, decay in layer.optimizer.weights.items() if layer.is_rule else ():
            after = _after(layer, decay, before.get(name, 0.0), steps, begin)
            if not layer.labels:
                result[name] = after
                continue
            place = result.setdefault(name, {})
            for label in layer.labels[:-1]:
                place = place.setdefault(label, {})
            place[layer.labels[-1]] = after
    return result


def _after(layer: Layer, decay: str, before: Any, steps: int, begin: int) -> Any:
    is_leaf = lambda x: isinstance(x, PerStep) or x is None  # noqa: E731
    link = next(link for link in layer.optimizer.chain if link.decay == decay)
    rho = per_step_leaves(layer.optimizer.hyperparameters()[decay])
    try:
        before = jax.tree.broadcast(before, jax.tree.map(lambda _: 0, rho, is_leaf=is_leaf))
    except ValueError:
        rho = jax.tree.broadcast(rho, before, is_leaf=is_leaf)
    return jax.tree.map(functools.partial(_weight, link, steps, begin), rho, before, is_leaf=is_leaf)


def _weight(link: Link, steps: int, begin: int, rho: Any, before: Any) -> Array | None:
    if rho is None:
        return None
    per_step = isinstance(rho, PerStep)
    form = link.denominator, link.may_be_one, steps, begin, per_step
    return _whole_weight(owned(rho.values if per_step else rho), stop_gradient(before) if begin else before, *form)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6), inline=True)
def _whole_weight(
    rho: Array, before: Any, denominator: int, may_be_one: bool, steps: int, begin: int, per_step: bool
) -> Array:
    """before + (1 - before) (1 - the product of rho over the steps), by logarithms: see `_mean_weight` in adam.py. Those of
    the steps before `begin` are given."""
    x = jnp.log(to_ratio(rho.astype(np.promote_types(rho.dtype, np.float32)), denominator, may_be_one))
    total = jnp.sum(x[:steps], axis=0) if per_step else steps * x
    if begin:
        total = substitute(jnp.sum(x[begin:steps], axis=0) if per_step else (steps - begin) * x, total)
    return before - (1 - before) * jnp.expm1(total)
