"""Where the loss of one example uses its weights: found in the program, leaf by leaf.

Invariant: a leaf is `found` only if its example's gradient is the sum over its uses of A' B, but for what the loss adds to
the example's part without looking at the example (a penalty). All other leaves are `general`: their gradients are taken one
example at a time.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr, Literal

from hypergrad._program_keys import Same, programs_in
from hypergrad.curvature._flat import LAYER, Flat
from hypergrad.curvature._kinds import PATTERNS, REGISTERED, Layer


# What gives the entries of one array another place: linear, and each entry of the result is one of the operand's, converted.
CONVERTED = "convert_element_type"
LAYOUT = {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "rev", "copy", CONVERTED}
PENALTY, EMPTY = "a penalty alone", "no entries"  # why a leaf is general
# What a penalty may pass between where it is added and the loss.
LINEAR = {
    "add", "sub", "neg", "add_any", "reshape", "squeeze", "transpose", "convert_element_type", "broadcast_in_dim", "copy",
    "reduce_sum", "slice", "concatenate",
}  # fmt: skip
OF_THE_FIRST = {"div", "gather", "dynamic_slice"}  # linear in their first operand
# Linear but where they bend: a second derivative of them is zero.
PIECEWISE = {
    "select_n", "max", "min", "clamp", "abs", "reduce_max", "reduce_min", "cummax", "cummin", "cumsum", "sort", "pad",
    "split", "rev", "scatter", "scatter-add", "dynamic_update_slice", "reduce_window_sum", "optimization_barrier", "cond",
}  # fmt: skip


class View(NamedTuple):
    """A parameter as an equation reads it: its leaf, and the equations of layout in between."""

    leaf: int
    program: Jaxpr  # that the equations are of
    equations: tuple[Any, ...] = ()

    @property
    def repeats(self) -> bool:
        """Whether an entry of the leaf is read at more than one place."""
        sizes = lambda e: (math.prod(e.invars[0].aval.shape), math.prod(e.outvars[0].aval.shape))  # noqa: E731
        return any(e.primitive.name == "broadcast_in_dim" and sizes(e)[0] < sizes(e)[1] for e in self.equations)

    @property
    def places(self) -> "View":
        """The same without conversions: where each entry goes, of arrays of any dtype."""
        return self._replace(equations=tuple(e for e in self.equations if e.primitive.name != CONVERTED))

    def __call__(self, x: Array) -> Array:
        for e in self.equations:
            alone = self.program.replace(constvars=[], invars=e.invars, eqns=[e], outvars=e.outvars)
            (x,) = jax.core.eval_jaxpr(alone, (), x)
        return x


@dataclasses.dataclass(frozen=True)
class Use:
    """One operation with one weight."""

    index: int  # of its equation
    place: int  # of the weight among its operands
    view: View
    layer: Layer | None  # None: the weight is added, or multiplied entry by entry

    @property
    def leaf(self) -> int:
        return self.view.leaf

    @property
    def sums(self) -> bool:
        """Whether an entry's gradient is a sum over entries of A' B: its square is no entry of (A^2)' (B^2) then."""
        return self.layer is not None and self.view.repeats


@dataclasses.dataclass(frozen=True)
class Found:
    """All uses of all leaves."""

    flat: Flat
    uses: tuple[Use, ...]  # of the leaves that are found
    general: dict[int, str]  # leaf -> the operation for which it is no layer's
    penalized: frozenset[int]  # leaves that the loss also reads without the example
    shifts: frozenset[int]  # leaves that are only added
    parts: tuple[Use, ...]  # what else reads leaves that are registered, but for penalties: it makes what is declared
    reads: dict[int, tuple[int, ...]]  # general leaf -> places of the equations that read it, but for penalties

    @property
    def key(self) -> Any:
        """Equal where the same was found: kinds of layers may have been added or replaced since."""
        uses = tuple((use.index, use.place, use.leaf, use.layer and Same(use.layer)) for use in self.uses)
        return uses, tuple(sorted(self.general.items())), self.penalized, self.shifts

    def of(self, leaf: int) -> tuple[Use, ...]:
        return tuple(use for use in self.uses if use.leaf == leaf)


def find(flat: Flat) -> Found:
    """Follows every leaf through the program to the operations that use it."""
    views: dict[Any, View] = {v: View(i, flat.jaxpr) for i, v in enumerate(flat.weights)}
    uses: list[Use] = []
    opaque: list[Use] = []  # what reads a leaf otherwise
    general: dict[int, str] = {i: EMPTY for i, v in enumerate(flat.weights) if not v.aval.size}
    for index, e in enumerate(flat.equations):
        places = [i for i, x in enumerate(e.invars) if not isinstance(x, Literal) and x in views]
        if places and _lays_out(e):
            view = views[e.invars[0]]
            views[e.outvars[0]] = view._replace(equations=(*view.equations, e))
            continue
        for place in places:
            view = views[e.invars[place]]
            layer, fits = _matched(e, place, view, alone=len(places) == 1)
            use = Use(index, place, view, layer)
            (uses if fits else opaque).append(use)
            if layer is not None and not fits:  # declared, and not what a layer of its kind is
                general[view.leaf] = layer.name
    return _sorted_out(flat, uses, opaque, general)


def _lays_out(e: Any) -> bool:
    """Whether what the equation gives has the real entries of its one operand in other places. The gradient in a weight that
    is complex, or counted in integers, is no product of matrices."""
    variables = _variables(e)
    reals = all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in (*variables, *e.outvars))
    return e.primitive.name in LAYOUT and len(variables) == 1 and reals


def _matched(e: Any, place: int, view: View, alone: bool) -> tuple[Layer | None, bool]:
    """(the kind of layer, or None for an operation entry by entry; whether it is one at all)."""
    name, real = e.primitive.name, jnp.issubdtype(e.outvars[0].aval.dtype, jnp.floating)
    if _is_call(e):
        kinds = REGISTERED[e.params["name"].removeprefix(LAYER)]
        kind = kinds[min(max(place - 2, 0), len(kinds) - 1)]
        return (kind, real and kind.fits(e, place)) if place >= 2 else (None, False)
    if not alone or not real:
        return None, False
    if not view.repeats:
        for layer in PATTERNS:
            if layer.match(e, place):
                return layer, True
    entrywise = name in ("add", "sub", "mul") and len(_variables(e)) == 2
    return None, entrywise


def _sorted_out(flat: Flat, uses: list[Use], opaque: list[Use], general: dict[int, str]) -> Found:
    registered = {use.leaf for use in uses if _is_call(flat.equations[use.index])}
    constant = without_examples(flat)
    added_alone = {i: _only_added(flat, [flat.equations[i]], constant) for i in {use.index for use in (*uses, *opaque)}}
    kept = []
    for use in uses:
        if use.leaf in registered and not _is_call(flat.equations[use.index]):
            opaque.append(use)
        elif _of_no_example(flat, use, constant) and (use.layer is None or added_alone[use.index]):
            opaque.append(use)  # a penalty's
        else:
            kept.append(use)
    penalized, rest = set(), [use for use in opaque if not added_alone[use.index]]
    for leaf in {use.leaf for use in opaque} - set(general):
        others = [use for use in rest if use.leaf == leaf]
        if others and leaf not in registered:
            general[leaf] = flat.equations[others[0].index].primitive.name
        elif len(others) < sum(use.leaf == leaf for use in opaque):
            penalized.add(leaf)
    used = {use.leaf for use in kept}
    for leaf in penalized - used:
        general[leaf] = PENALTY
    reads = {i: tuple(u.index for u in (*kept, *rest) if u.leaf == i) for i, why in general.items() if why != EMPTY}
    kept = [use for use in kept if use.leaf not in general]
    parts = tuple(use for use in rest if use.leaf in registered - set(general))
    added = {leaf for leaf in used - set(general) if all(_adds(flat, u) for u in kept if u.leaf == leaf)}
    return Found(flat, tuple(kept), general, frozenset(penalized - set(general)), frozenset(added), parts, reads)


def _of_no_example(flat: Flat, use: Use, constant: set[Any]) -> bool:
    """Whether no example has a part in what the weight meets here."""
    invars = flat.equations[use.index].invars
    return all(x in constant for i, x in enumerate(invars) if i != use.place and not isinstance(x, Literal))


def _adds(flat: Flat, use: Use) -> bool:
    return use.layer.adds if use.layer is not None else flat.equations[use.index].primitive.name in ("add", "sub")


def _is_call(e: Any) -> bool:
    return e.primitive.name == "jit" and e.params["name"].startswith(LAYER)


def _variables(e: Any) -> list[Any]:
    return [x for x in e.invars if not isinstance(x, Literal)]


def without_examples(flat: Flat) -> set[Any]:
    """Variables that depend on parameters, theta and constants alone."""
    constant = set(flat.jaxpr.invars[: flat.constants + flat.parameters + flat.thetas])
    for e in flat.equations:
        if all(x in constant for x in _variables(e)):
            constant.update(e.outvars)
    return constant


def _only_added(flat: Flat, equations: list[Any], constant: set[Any]) -> bool:
    """Whether what these equations give reaches the loss by sums alone, once it meets what examples have a part in."""
    given = {x for e in equations for x in e.outvars}
    return given <= constant and linear_in(flat, given, constant)


def is_linear(e: Any, given: set[Any], constant: set[Any]) -> bool:
    """Whether an equation is linear in the variables given, up to a constant."""
    met, others = _met(e, given)
    name, of_first = e.primitive.name, e.invars[0] is met[0]
    if name == "select_n":  # by a mask
        return isinstance(e.invars[0], Literal) or (not of_first and e.invars[0] in constant)
    scaled = name in ("mul", "dot_general") or (name in OF_THE_FIRST and of_first)
    return name in LINEAR or (scaled and len(met) == 1 and all(x in constant for x in others))


def is_piecewise(e: Any, given: set[Any], constant: set[Any]) -> bool:
    """The same on each of several pieces, whatever says which."""
    _, others = _met(e, given)
    if e.primitive.name in PIECEWISE or is_linear(e, given, constant.union(others)):
        return True
    called = [x for x in programs_in(tuple(e.params.values())) if len(x.invars) == len(e.invars)]
    return bool(called) and all(_straight(x.eqns, _inside(x, e, given), set(), is_piecewise) for x in called)


def _inside(called: Jaxpr, e: Any, given: set[Any]) -> set[Any]:
    """What of the variables given a program that an equation calls knows."""
    pairs = zip(called.invars, e.invars, strict=True)
    return {x for x, outside in pairs if not isinstance(outside, Literal) and outside in given}


Rule = Callable[[Any, set[Any], set[Any]], bool]


def linear_in(flat: Flat, given: set[Any], constant: set[Any], rule: Rule = is_linear) -> bool:
    """Whether the loss is linear in these variables, as far as they do not make constants; constant: its coefficients. What
    is no float, as a comparison, passes no derivative on."""
    return _straight(flat.equations, given, constant, rule)


def _straight(equations: Iterable[Any], given: set[Any], constant: set[Any], rule: Rule) -> bool:
    reached = set(given)
    for e in equations:
        if reached.isdisjoint(_variables(e)) or given & set(e.outvars):
            continue
        if e.primitive.name == "stop_gradient" or not any(jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in e.outvars):
            continue
        if not (rule(e, reached, constant) or all(x in constant for x in e.outvars)):
            return False
        reached.update(e.outvars)
    return True


def _met(e: Any, given: set[Any]) -> tuple[list[Any], list[Any]]:
    """(what it reads of the variables given, what else)"""
    met, others = ([x for x in _variables(e) if (x in given) == inside] for inside in (True, False))
    return met, others
