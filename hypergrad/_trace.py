"""From the user's loss and source of batches to the programs that a run is made of (`hypergrad.loop.functions.Functions`).

Invariant: each function is called here, when training is entered, and never again.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr

from hypergrad import _door as door
from hypergrad import _programs as programs
from hypergrad._closures import name_in, name_of
from hypergrad._own_rules import is_float, own_rule
from hypergrad._program_keys import Key, array_key, equations
from hypergrad._programs import Program
from hypergrad.loop.functions import Frozen, Functions
from hypergrad.loop.step import Hypers, Rule, Values, increment
from hypergrad.optimizers.chain import PARAMS, Optimizer


class Traced(NamedTuple):
    """The user's functions, and what they compute with."""

    functions: Functions
    theta: list[Array]  # its float leaves, and float values that the loss reads from outside and that are traced
    frozen: Frozen
    names: tuple[str, ...]  # of the leaves of `frozen`, for errors
    returned: Any  # by the loss: `ShapeDtypeStruct`s


def trace(loss: Callable[..., Any], params: Any, theta: Any, batches: Any) -> Traced:
    """Call each function once, under the caller's settings, and see what it computes."""
    leaves, tree = jax.tree.flatten(params)
    (theta_floats, theta_others), whole_theta = _split(theta, eqx.is_inexact_array)
    (batch_leaves, _), whole_batches = _split(batches, eqx.is_array)
    rest: list[Any] = []

    def arrays_of_batch(arrays: list[Any], t: Array) -> list[Any]:
        with door.calling_batches(batches):
            found, others = eqx.partition(whole_batches(arrays, [])(t), eqx.is_array_like)
        rest.append((jax.tree.structure(found), others))
        return jax.tree.leaves(found)

    step = jax.ShapeDtypeStruct((), jnp.int32)
    batch, of_batch = programs.trace(arrays_of_batch, batch_leaves, step)
    door.check_pure(batches, (batch, of_batch), lambda: programs.trace(arrays_of_batch, batch_leaves, step))
    structure, others = rest[0]

    def value(w: list[Array], floats: list[Array], arrays: list[Any], batch: list[Any]) -> Any:
        whole_batch = eqx.combine(jax.tree.unflatten(structure, batch), others)
        arguments = jax.tree.unflatten(tree, w), whole_theta(floats, arrays), whole_batch
        with door.calling("loss(params, theta, batch)", *arguments):
            return loss(*arguments)

    arguments = leaves, theta_floats, theta_others, batch.out
    program, of_loss = programs.trace(value, *arguments)
    captured = tuple(isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact) for x in of_loss)
    functions = Functions(
        batch,
        program,
        captured,
        _rules(loss, program, of_loss, arguments),
        symmetric=_symmetric(program.jaxpr),
        narrow=_narrow(program.jaxpr),
        collective=_collective(program) or _collective(batch),
        sure=not any("callback" in e.primitive.name or e.primitive.name == "ffi_call" for e in equations(batch.jaxpr)),
    )
    floats = [*theta_floats, *(x for x, traced in zip(of_loss, captured, strict=True) if traced)]
    untraced = [x for x, traced in zip(of_loss, captured, strict=True) if not traced]
    frozen = Frozen(theta_others, [programs.owned(x) for x in untraced], [programs.owned(x) for x in of_batch], batch_leaves)
    names = (
        *_paths("theta", theta, lambda x: eqx.is_array(x) and not eqx.is_inexact_array(x)),
        *("what the loss closes over" for _ in untraced),
        *(f"{name_in(batches, x)} of `{name_of(batches)}`" for x in of_batch),
        *_paths("batches", batches, eqx.is_array),
    )
    return Traced(functions, floats, frozen, names, program.out)


def _split(tree: Any, chosen: Callable[[Any], bool]) -> tuple[tuple[list[Any], list[Any]], Callable[..., Any]]:
    """((arrays that are chosen, its other arrays), from such lists back to the whole)."""
    first, rest = eqx.partition(tree, chosen)
    second, static = eqx.partition(rest, eqx.is_array)
    structures = [jax.tree.structure(x) for x in (first, second)]

    def whole(*lists: list[Any]) -> Any:
        return eqx.combine(*map(jax.tree.unflatten, structures, lists), static)

    return (jax.tree.leaves(first), jax.tree.leaves(second)), whole


def _paths(name: str, tree: Any, chosen: Callable[[Any], bool]) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [name + jax.tree_util.keystr(path) for path, x in leaves if chosen(x)]


def rule_programs(optimizer: Optimizer, rule: Rule, values: Values, h: Hypers) -> Rule:
    """The rule, with what the functions of an optimizer that is not the library's compute, to be compared.

    values: initial ones; h: of one step. Such a function, or a derivative rule that it uses, may read something else today,
    like a loss; but nothing is differentiated in what it reads from outside.
    """
    wide = [jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip(values[PARAMS], rule.dtypes, strict=True)]
    found: list[Hashable] = []
    collective = False

    def note(what: str, function: Callable[..., Any], held_by: Any, *args: Any) -> None:
        nonlocal collective
        program, held = programs.trace(function, *args)
        collective |= _collective(program)
        key: Hashable = program.key
        if any(map(own_rule, equations(program.jaxpr))):
            key, held = _derived(function, args) or (object(), held)
        for x in held:
            if isinstance(x, jax.core.Tracer):
                raise ValueError(
                    f"{what} reads the traced value {name_in(held_by, x)} from outside, whose derivative would be lost. "
                    "Make it a hyperparameter: a field of the optimizer."
                )
        found.append((key, tuple(array_key(x) for x in held)))

    for own, link in zip(optimizer.layers[-1].chain, rule.chain, strict=True):
        for j in rule.leaves if _foreign(own.increment) else ():
            others = {k.name: values[k.name][j] for k in rule.chain if k is not link}
            one = functools.partial(increment, link)
            note(f"the increment of link `{link.name}`", one, own.increment, h[j], others, wide[j])
    for transform in rule.transforms:
        if _foreign(transform.function):
            note(f"the transformation {transform.name}", transform.__call__, transform.function, h, wide, wide)
    return dataclasses.replace(rule, programs=tuple(found) or None, collective=collective)


def _foreign(function: Any) -> bool:
    return not str(getattr(function, "__module__", "")).startswith("hypergrad.")


def _rules(loss: Any, program: Program, constants: list[Any], arguments: Any) -> Hashable:
    """What the derivative rules that the loss brings along compute, to the second order; None where it has none.

    They are no part of the loss as a program. A rule is a Python function like the loss: it may read something else today,
    and it may hold arrays, which are told by identity.
    """
    if not any(map(own_rule, equations(program.jaxpr))):
        return None

    def values(w: list[Array], theta: list[Array], constants: list[Any], *rest: Any) -> list[Array]:
        return jax.tree.leaves(program(constants, w, theta, *rest))  # the loss, and the evidence beside it

    w, theta, *rest = arguments
    found, held = _derived(values, (w, theta), constants, *rest) or (object(), [])  # which is never the same again
    for x in held:  # by rules: the constants of the loss are arguments here
        if isinstance(x, jax.core.Tracer):
            raise ValueError(
                f"a derivative rule that `loss` ({name_of(loss)}) uses closes over the traced value {name_in(loss, x)}, "
                "whose derivative would be lost. Pass it to the function that has the rule as one of its arguments."
            )
    return found, tuple(array_key(x) for x in held)


def _derived(function: Callable[..., Any], along: tuple[Any, ...], *rest: Any) -> tuple[Key, list[Any]] | None:
    """What the derivatives of function(*along, *rest) compute, to the second order if there is one, and what they hold.

    None: it has no derivative. Who asks for it will be told; training alone does not need it.
    """

    def first(along: tuple[Any, ...], *rest: Any) -> Any:
        out, pull = jax.vjp(lambda along: function(*along, *rest), along)
        return pull(out)

    def second(along: tuple[Any, ...], *rest: Any) -> Any:
        out, pull = jax.vjp(lambda along: first(along, *rest), along)
        return pull(out)

    for order in (second, first):
        with contextlib.suppress(Exception):
            program, held = programs.trace(order, along, *rest)
            return program.key, held
    return None


def _collective(program: Program) -> bool:
    return any(type(effect).__name__ == "NamedAxisEffect" for effect in program.jaxpr.effects)


def _symmetric(jaxpr: Jaxpr) -> bool:
    """Whether the Jacobian of the loss's gradient is symmetric for certain: it is where the gradient is one of something.

    A loss whose derivative rules are its own has a field in the place of a gradient, which may be the gradient of nothing. A
    `stop_gradient` is a constant to all derivatives, so that what is left is a gradient.
    """
    return not any(map(own_rule, equations(jaxpr)))


def _narrow(jaxpr: Jaxpr) -> bool:
    found = {x.aval.dtype for e in equations(jaxpr) for x in (*e.invars, *e.outvars) if is_float(x)}
    return any(jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp for dtype in found)
