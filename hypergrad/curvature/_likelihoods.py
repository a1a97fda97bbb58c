"""What a loss says of the model's outputs: the factor of its Hessian in them, and how labels are drawn of the model.

Invariant: with value[...] the loss of one prediction, factor(f) factor(f)' is the Hessian of value in f, and the mean of
sampled(f) sampled(f)' over labels that the model itself draws is the same matrix.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Literal

from hypergrad.curvature._flat import LIKELIHOOD, Flat, likelihood_of
from hypergrad.curvature._uses import Found, is_linear, is_piecewise, linear_in, without_examples


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """value: (outputs, targets) -> the loss of each prediction. categories: whether a prediction is a row of outputs."""

    name: str
    value: Callable[[Array, Array], Array]
    root: Callable[[Array], Array]  # f -> the factor: [..., classes, classes] where a prediction is a row, else like f
    sample: Callable[[Array, Array], Array]  # (f, key) -> the gradient in f of a label that the model draws
    rows: bool = False
    logarithms: bool = False  # value is the logarithm of each class, and the loss a sum of negative multiples of them


def _softmax(f: Array, y: Array) -> Array:
    if jnp.issubdtype(y.dtype, jnp.integer):
        return -jnp.take_along_axis(jax.nn.log_softmax(f), y[..., None], -1)[..., 0]
    return -jnp.sum(y * jax.nn.log_softmax(f), -1)


def _softmax_root(f: Array) -> Array:
    p, root = jax.nn.softmax(f), jnp.exp(jax.nn.log_softmax(f) / 2)  # a root of p has no derivative where p is 0
    return root[..., None] * jnp.eye(f.shape[-1], dtype=f.dtype) - p[..., :, None] * root[..., None, :]


def _wide(f: Array) -> Array:
    """Draws of 16 bits have too few levels for small probabilities."""
    return f.astype(jnp.promote_types(f.dtype, jnp.float32))


def _softmax_sample(f: Array, key: Array) -> Array:
    label = jax.random.categorical(key, _wide(f))
    return jax.nn.softmax(f) - jax.nn.one_hot(label, f.shape[-1], dtype=f.dtype)


def _sigmoid(f: Array, y: Array) -> Array:
    return -y * jax.nn.log_sigmoid(f) - (1 - y) * jax.nn.log_sigmoid(-f)


def _sigmoid_sample(f: Array, key: Array) -> Array:
    label = jax.random.bernoulli(key, jax.nn.sigmoid(_wide(f)))
    return jax.nn.sigmoid(f) - label.astype(f.dtype)


def _normal(key: Array, f: Array) -> Array:
    return jax.random.normal(key, f.shape, f.dtype)


SOFTMAX = Likelihood("softmax_cross_entropy", _softmax, _softmax_root, _softmax_sample, rows=True)
SIGMOID = Likelihood(
    "sigmoid_cross_entropy",
    _sigmoid,
    lambda f: jnp.exp((jax.nn.log_sigmoid(f) + jax.nn.log_sigmoid(-f)) / 2),
    _sigmoid_sample,
)
SQUARED = Likelihood(
    "squared_error",
    lambda f, y: jnp.square(f - y),
    lambda f: jnp.full_like(f, 2**0.5),
    lambda f, key: 2**0.5 * _normal(key, f),
)
HALF = Likelihood("half_squared_error", lambda f, y: jnp.square(f - y) / 2, jnp.ones_like, lambda f, key: _normal(key, f))
POISSON = Likelihood(
    "poisson",
    lambda f, y: jnp.exp(f) - y * f,
    lambda f: jnp.exp(f / 2),
    lambda f, key: jnp.exp(f) - jax.random.poisson(key, jnp.exp(_wide(f)), f.shape).astype(f.dtype),
)
LIKELIHOODS = {x.name: x for x in (SOFTMAX, SIGMOID, SQUARED, HALF, POISSON)}
# A cross entropy written down with `jax.nn.log_softmax`.
LOG_SOFTMAX = dataclasses.replace(SOFTMAX, name="log_softmax", logarithms=True)
KINDS = {**LIKELIHOODS, "log_softmax": LOG_SOFTMAX}


def likelihood(name: str, outputs: Array, targets: Array) -> Array:
    """The loss of each prediction, declared: where the model ends, and what its outputs mean.

    name: `softmax_cross_entropy` (outputs [..., classes]: logits; targets: integers, or rows that sum to 1),
    `sigmoid_cross_entropy` (logits), `squared_error` ((f - y)^2), `half_squared_error`, or `poisson` (exp(f) - y f: outputs
    are logarithms of rates). Returns an array like the targets, of which a loss takes the mean. optax's functions of the
    same meaning are found without.
    """
    if name not in LIKELIHOODS:
        raise ValueError(f"`name` must be one of {', '.join(LIKELIHOODS)}; got {name!r}.")
    kind, given = LIKELIHOODS[name], outputs.shape[:-1] if LIKELIHOODS[name].rows else outputs.shape
    labels = kind.rows and targets.shape == given
    fits = targets.shape == outputs.shape or (labels and not jnp.issubdtype(targets.dtype, jnp.floating))
    if not fits:
        raise ValueError(
            f"targets of shape {targets.shape} do not fit outputs of shape {outputs.shape} for {name!r}: it needs {given}"
            f"{f' (integers) or {outputs.shape} (rows that sum to 1)' if kind.rows else ''}; these are {targets.dtype}."
        )
    if not jnp.issubdtype(targets.dtype, jnp.floating):  # what counts or says yes and no has no negative
        targets = targets.astype(jnp.int32 if labels else outputs.dtype)
    return _DECLARED[name](outputs, targets)


def _declare(kind: Likelihood) -> Callable[[Array, Array], Array]:
    def hypergrad_likelihood(outputs: Array, targets: Array) -> Array:
        return kind.value(outputs, targets)

    hypergrad_likelihood.__name__ = hypergrad_likelihood.__qualname__ = f"{LIKELIHOOD}{kind.name}"
    return jax.jit(hypergrad_likelihood)


_DECLARED = {name: _declare(kind) for name, kind in LIKELIHOODS.items()}


@dataclasses.dataclass(frozen=True)
class End:
    """Where the model ends. kind None: nothing is known of the loss but its Hessian in the outputs, by autodiff."""

    kind: Likelihood | None
    outputs: int  # place of the equation that gives the outputs
    values: int | None  # and of the one that gives the loss of each prediction


def find_end(found: Found) -> End | None:
    """The end in a likelihood that is declared, in one of optax's functions, or else where all layers have met, unless that
    is a sum of losses already."""
    known = _likelihood_end(found)
    if known is not None:
        return known
    equations = found.flat.equations
    last = max((use.index for use in found.uses), default=len(equations))
    meeting = [i for i in range(last, len(equations)) if _meets(found, i)]
    return None if not meeting or _past_the_end(found, meeting[0]) else End(None, meeting[0], None)


def _past_the_end(found: Found, place: int) -> bool:
    """Whether the loss is linear in this equation's result, piece by piece at least, and not in what each layer and each
    general weight gives it on ways that pass no other layer. What bends is before this place then, in several others, and
    the GGN of a model that ended here would be zero."""
    flat, depends = found.flat, _depending(found.flat)
    coefficients = {x for e in flat.equations for x in e.outvars if x not in depends} | set(flat.jaxpr.invars)
    rule = is_linear if linear_in(flat, set(flat.equations[place].outvars), coefficients) else is_piecewise
    linear = lambda flat, of: linear_in(flat, of, coefficients, rule)  # noqa: E731
    if not linear(flat, set(flat.equations[place].outvars)):
        return False
    layers = {use.index for use in found.uses}
    if not all(linear(_beside(flat, layers - {i}), set(flat.equations[i].outvars)) for i in layers):
        return True
    beside = _beside(flat, layers)
    general = _reached(flat, {x for i, x in enumerate(flat.weights) if i in found.reads})
    others = {x for e in flat.equations for x in e.outvars} | set(flat.jaxpr.invars)
    readers = [flat.equations[i] for i in set().union(*found.reads.values())]
    return not all(
        rule(e, general, others) and linear(beside, set(e.outvars))
        for e in readers
        if any(e is other for other in beside.equations)
    )


def _beside(flat: Flat, layers: set[int]) -> Flat:
    """The program without these layers, and without what leads to them alone."""
    kept, leading = [], set(flat.jaxpr.outvars)
    for i, e in reversed(list(enumerate(flat.equations))):
        if i not in layers and not leading.isdisjoint(e.outvars):
            kept.append(e)
            leading.update(_read(flat, i))
    return dataclasses.replace(flat, jaxpr=flat.jaxpr.replace(eqns=kept[::-1]))


def _likelihood_end(found: Found) -> End | None:
    """One call of one known function, of outputs that all layers go through, in whose values the loss is linear."""
    flat = found.flat
    depends, made = _depending(flat), {x: i for i, e in enumerate(flat.equations) for x in e.outvars}
    penalties = without_examples(flat)
    marked = {i: kind for i, e in enumerate(flat.equations) if (kind := likelihood_of(e)) and not penalties >= {*e.outvars}}
    if LOG_SOFTMAX.name in marked.values():  # it says more than who called it: targets need not sum to 1
        marked = {i: kind for i, kind in marked.items() if kind == LOG_SOFTMAX.name}
    read = {x for i in marked for x in _read(flat, i) if made.get(x) not in marked}
    outside: set[Any] = {x for i in range(len(flat.equations)) if i not in marked for x in _read(flat, i)}
    entering = [x for x in read if x in depends and x in made]
    leaving = [x for x in outside | set(flat.jaxpr.outvars) if x in depends and made.get(x) in marked]
    if len(entering) != 1 or len(leaving) != 1 or len(set(marked.values())) != 1:
        return None
    coefficients = {x for x in made if x not in depends} | set(flat.jaxpr.invars)
    plain = _as_it_is_called([flat.equations[i] for i in marked], read, entering[0], coefficients)
    if not (plain and _meets(found, made[leaving[0]]) and linear_in(flat, {leaving[0]}, coefficients)):
        return None
    known = KINDS[next(iter(marked.values()))]
    if not _one_each(known, entering[0].aval, leaving[0].aval):
        return None
    return End(known, made[entering[0]], made[leaving[0]])


def _one_each(kind: Likelihood, outputs: Any, losses: Any) -> bool:
    """Whether there is a loss for each prediction: not for several of which one is made, as where targets are broadcast or
    classes lie along two axes."""
    whole = not kind.rows or kind.logarithms
    return bool(losses.size == math.prod(outputs.shape if whole else outputs.shape[:-1]))


def _as_it_is_called(equations: list[Any], read: set[Any], outputs: Any, coefficients: set[Any]) -> bool:
    """Whether a known function has no mask, classes along the last axis, and the model's outputs where outputs belong."""
    if any(x.aval.dtype == bool for x in read):
        return False
    reached, curved = {outputs}, False
    for e in equations:
        if any(not isinstance(x, Literal) and x in reached for x in e.invars):
            axes = e.params.get("axes", ())
            if axes and tuple(axes) != (e.invars[0].aval.ndim - 1,):
                return False
            curved |= not is_linear(e, reached, coefficients)
            reached.update(e.outvars)
    return curved  # targets enter linearly


def _meets(found: Found, place: int) -> bool:
    """Whether all that the loss has of its weights, but for penalties, goes through this equation's result."""
    flat = found.flat
    readers = {use.index for use in found.uses}.union(*found.reads.values()) - {place}
    reached = _reached(flat, {x for i in readers for x in flat.equations[i].outvars}, but=place)
    return len(flat.equations[place].outvars) == 1 and not reached & set(flat.jaxpr.outvars)


def _read(flat: Flat, i: int) -> list[Any]:
    """Variables that an equation reads something of: nothing is passed on by what has no entries."""
    return [x for x in flat.equations[i].invars if not isinstance(x, Literal) and 0 not in getattr(x.aval, "shape", ())]


def _depending(flat: Flat) -> set[Any]:
    """Variables that depend on a parameter."""
    return _reached(flat, set(flat.weights))


def _reached(flat: Flat, variables: set[Any], but: int | None = None) -> set[Any]:
    """These and what depends on them, other than by the equation `but`."""
    found = set(variables)
    for i, e in enumerate(flat.equations):
        if i != but and any(x in found for x in _read(flat, i)):
            found.update(e.outvars)
    return found
