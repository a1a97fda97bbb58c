"""What a rule makes of its hyperparameters before training: by `prepare`, and by `begin` where a run goes on from a state.

Invariant: every entry is a float array with a first axis of 1 or all steps that fits a link of its block, and every decay is
an exact n/d.
"""

import math
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import stop_gradient

from hypergrad._programs import owned
from hypergrad.exact import substitute
from hypergrad.hypers import describe
from hypergrad.optimizers.chain import Optimizer, early
from hypergrad.optimizers.expand import Hypers, ratio
from hypergrad.optimizers.partition import Stack


class Prepared(NamedTuple):
    """What the increments of a block read."""

    h: Hypers
    given: frozenset[str]  # the decays that are fields still, as they were given
    begun: frozenset[str] = frozenset()  # those that `begin` put in their place


def prepared(stack: Stack, fields: Hypers, steps: int, dtype: np.dtype, on_grid: bool = True, begin: int = 0) -> Prepared:
    """`expand`ed fields followed by the rule's `prepare`. dtype: what entries that are no floats become; on_grid, begin: as
    `lay_out` has them."""
    decays = {str(link.decay): link for link in stack.chain if link.decay}
    rule = stack.rule.optimizer
    own, around = _parts(stack, fields)
    h = {**prepare(rule, own, steps, dtype), **around}
    if begin:
        h |= _of_late_steps(rule, own, h, steps, dtype, begin)
    h |= {key: jnp.zeros_like(h[key]) for key in (_unfounded(stack) if on_grid else rule.bounds) if key in h}
    given = frozenset(name for name in decays if h[name] is fields.get(name))
    return Prepared({**h, **{name: ratio(link, h[name]) for name, link in decays.items() if name not in given}}, given)


def _of_late_steps(rule: Optimizer, own: Hypers, h: Hypers, steps: int, dtype: np.dtype, begin: int) -> Hypers:
    """What `prepare` makes for each step, the same numbers, with early steps and what the run goes on from as given: sums
    and products over steps, such as bias corrections, would pass the derivative on to them."""

    def late(own: Hypers) -> Hypers:
        early = lambda x: (jnp.arange(steps) < begin).reshape(-1, *(1,) * (x.ndim - 1))  # noqa: E731
        one = lambda key, x: stop_gradient(x) if key in rule.weights else jnp.where(early(x), stop_gradient(x), x)  # noqa: E731
        return prepare(rule, {key: one(key, x) for key, x in own.items()}, steps, dtype)

    like = jax.eval_shape(late, own)
    wanted = {key: x for key, x in h.items() if key in like and x is not own.get(key) and x.shape == like[key].shape}
    if not wanted:
        return {}
    # Compiled where there is one for each weight, so that none is spread over the steps that these do not need.
    compiled = jax.jit if any(x.size > x.shape[0] for x in own.values()) else lambda f: f
    found = compiled(lambda own: {key: x for key, x in late(own).items() if key in wanted})(own)
    return {key: substitute(found[key], x) for key, x in wanted.items()}


def begun(
    stack: Stack,
    before: Prepared,
    fields: Hypers,
    z: dict[str, Array],
    steps: int,
    dtype: np.dtype,
    made: dict[Hashable, Any],
) -> Prepared:
    """Followed by the rule's `begin`. z: the initial values of the block's links; made: for all blocks, so that decays that
    `begin` makes of one array stay one."""
    rule, h = stack.rule.optimizer, before.h
    own, around = _parts(stack, h)
    found = _checked(rule, "begin", rule.begin(own, z), steps, dtype)
    if left_out := sorted(own.keys() - found.keys()):
        raise TypeError(
            f"{type(rule).__name__}.begin leaves out {', '.join(left_out)}, which `prepare` returned: return "
            "{**h, ...} of what it got and changes."
        )
    h = {**found, **around}
    decays = {str(link.decay): link for link in stack.chain if link.decay}
    given = frozenset(name for name in decays if h[name] is fields.get(name))
    changed = {name: link for name, link in decays.items() if name not in given and h[name] is not before.h[name]}
    for name, link in changed.items():
        key = id(h[name]), link.denominator, link.may_be_one
        if key not in made:
            made[key] = h[name], ratio(link, h[name])  # with what it was made of, whose id is another's once it is gone
        h[name] = made[key][1]
    return Prepared(h, given, frozenset(changed))


def prepare(rule: Optimizer, h: Hypers, steps: int, dtype: np.dtype) -> Hypers:
    """`rule.prepare`, which must give every decay its value."""
    found, name = _checked(rule, "prepare", rule.prepare(h, steps), steps, dtype), type(rule).__name__
    for link in rule.chain:
        if link.decay and link.decay not in found:
            raise TypeError(
                f"{name}, link `{link.name}`: its decay is called {link.decay!r}, and no hyperparameter is, nor anything "
                f"that `prepare` returns. There are: {', '.join(found)}."
            )
    return found


def check_fits(stack: Stack, path: str, h: Hypers, z: Iterable[Array]) -> None:
    """Refuse what broadcasts against no link of a block. path: of its first leaf; z: the initial values of its links."""
    shapes = {x.shape for x in z}
    for key, x in h.items():
        own = x.shape[1:]
        if math.prod(own) != 1 and not any(_broadcasts(own, shape) for shape in shapes):
            raise ValueError(
                f"{type(stack.rule.optimizer).__name__}: `prepare` or `begin` gives {key!r} the shape {x.shape} for "
                f"params{path}. After the axis of steps, {own} does not broadcast against what its links hold: "
                f"{', '.join(map(str, sorted(shapes)))}. What differs by step alone has the shape [steps, 1, ..., 1], "
                "with as many axes as h has: x.reshape(-1, *[1] * (h[name].ndim - 1))."
            )


def _broadcasts(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    tail = shape[len(shape) - len(own) :]
    return len(own) <= len(shape) and all(a in (1, b) for a, b in zip(own, tail, strict=True))


def _parts(stack: Stack, h: Hypers) -> tuple[Hypers, Hypers]:
    """Of the rule, and of the transformations around it."""
    around = {key for layer in stack.layers[:-1] for key in map(layer.key, layer.optimizer.hyperparameters())}
    return {k: x for k, x in h.items() if k not in around}, {k: x for k, x in h.items() if k in around}


def _unfounded(stack: Stack) -> list[str]:
    """Those of `Optimizer.bounds` that do not hold: a link is another, or sees the gradient where another sees it
    transformed."""
    rule = stack.rule.optimizer
    first = early(rule.chain, {name for layer in stack.layers[:-1] for name in layer.optimizer.reads})  # type: ignore[attr-defined]
    found = []
    for key, links in rule.bounds.items():
        places = [rule.chain.index(link) if link in rule.chain else None for link in links]
        if None in places or len({place < first for place in places if place is not None}) > 1:
            found.append(key)
    return found


def _checked(rule: Optimizer, method: str, found: Any, steps: int, dtype: np.dtype) -> Hypers:
    """What a method of the rule returned, entry by entry."""
    name = f"{type(rule).__name__}.{method}"
    if not isinstance(found, dict):
        raise TypeError(f"{name} must return a dict, {{**h, ...}} of what it got and adds; got {describe(found)}.")
    return {key: _entry(f"{name}: {key!r}", x, steps, dtype) for key, x in found.items()}


def _entry(where: str, x: Any, steps: int, dtype: np.dtype) -> Array:
    kind = jnp.result_type(x) if eqx.is_array_like(x) else None
    if kind is None or not any(jnp.issubdtype(kind, real) for real in (jnp.floating, jnp.integer, jnp.bool_)):
        raise TypeError(f"{where} must be a real number or an array of them; got {describe(x)}.")
    x = owned(x) if jnp.issubdtype(kind, jnp.floating) and not isinstance(x, float) else jnp.asarray(x).astype(dtype)
    x = x[None] if x.ndim == 0 else x
    if x.shape[0] not in (1, steps):
        raise ValueError(
            f"{where} has shape {x.shape}; its first axis must be steps={steps}, or 1 where all steps have the same. Give "
            "an array of a parameter's shape that axis: x[None]."
        )
    return x
