"""From the user's loss and source of batches to the programs that a run is made of (`hypergrad.run.functions.Functions`).

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
from hypergrad._mended import mended, mending
from hypergrad._microbatches import part_of, reject_on_mesh, without_mesh
from hypergrad._own_rules import is_float, own_batching, own_rule
from hypergrad._problem import Problem
from hypergrad._program_keys import Key, array_key, equations
from hypergrad._programs import Program
from hypergrad._signals import check_signal
from hypergrad._source import source_of, split_arrays
from hypergrad.optimizers.block import Floats
from hypergrad.optimizers.chain import STATISTICS, foreign
from hypergrad.optimizers.expand import Hypers
from hypergrad.run.functions import Frozen, Functions, Rules, Signals
from hypergrad.run.reads import StepTheta, reads_of
from hypergrad.run.spec import Run, key_of_steps


class Traced(NamedTuple):
    """The user's functions, and what they compute with."""

    functions: Functions
    theta: list[Array]  # its float leaves, and float values that the loss reads from outside and that are traced
    frozen: Frozen
    names: tuple[str, ...]  # of the leaves of `frozen`, for errors
    returned: Any  # by the loss: `ShapeDtypeStruct`s
    given: Callable[..., tuple[Any, Any]]  # (float leaves of theta, its other arrays, leaves of a batch) -> (theta, batch)
    like: tuple[list[Any], list[Any], list[Any]]  # what it is given, at a step


def trace(problem: Problem) -> Traced:
    """Call each function once, under the caller's settings, and see what it computes.

    problem: checked. Its statistics say whether the loss returns evidence, too; its metric, that a step must see all of
    theta; its microbatches, what the loss sees of a batch.
    """
    theta, per_step = door.theta_by_steps(problem.theta, problem.steps)
    (floats, others), whole_theta = split_arrays(theta, eqx.is_inexact_array)
    source, leaves = source_of(problem.batches), jax.tree.leaves(problem.params)

    def given(floats: list[Array], arrays: list[Any], batch: list[Any]) -> tuple[Any, Any]:
        return whole_theta(floats, arrays), source.whole(batch)

    of_step = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if own else x for x, own in zip(floats, per_step, strict=True)]
    seen = source.batch.out
    if problem.microbatches is not None:
        seen = part_of(problem.microbatches, jax.tree.unflatten(source.structure, seen))
    arguments = leaves, of_step, others, seen
    program, constants = _loss(problem, given, arguments)
    captured = tuple(isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact) for x in constants)
    of_signals, held_by_signals = _signals(problem, given, arguments, constants, captured)
    sizes = len(leaves), len(floats), len(others), len(source.batch.out)
    # A signal takes what the loss takes; a step's own leaf is small.
    at_once = bool(problem.optimizer.signals or problem.microbatches) or problem.metric is not None
    found = reads_of(program, sizes, [own or at_once for own in per_step], captured)
    rules = rules_of(problem.loss, program, constants, arguments)
    also = [source.batch, *([of_signals.program] if of_signals else [])]
    functions = Functions(
        Program(source.batch.jaxpr, key_today(source.batch), source.batch.out),
        Program(mended(found.loss.jaxpr), key_today(program), program.out),
        captured,
        StepTheta((*per_step, *[False] * sum(captured)), found.reads, found.indices),
        rules,
        symmetric=_symmetric(program.jaxpr),
        narrow=_narrow(program.jaxpr),
        collective=reads_axes(program, rules) or any(map(reads_axes, also)),
        sure=not any("callback" in e.primitive.name or e.primitive.name == "ffi_call" for e in source.equations),
        signals=of_signals,
    )
    traced = [x for x, own in zip(constants, captured, strict=True) if own]
    untraced = [x for x, own in zip(constants, captured, strict=True) if not own]
    kept = [[programs.owned(x) for x in xs] for xs in (untraced, held_by_signals, source.constants)]
    frozen = Frozen(others, kept[0], kept[1], [], kept[2], source.leaves)
    names = (
        *_paths("theta", theta, lambda x: eqx.is_array(x) and not eqx.is_inexact_array(x)),
        *("what the loss closes over" for _ in untraced),
        *("what a signal closes over" for _ in held_by_signals),
        *(f"{name_in(problem.batches, x)} of `{name_of(problem.batches)}`" for x in source.constants),
        *_paths("batches", problem.batches, eqx.is_array),
    )
    return Traced(functions, [*floats, *traced], frozen, names, program.out, given, (of_step, others, source.batch.out))


def _loss(problem: Problem, given: Callable[..., Any], arguments: Any) -> tuple[Program, list[Any]]:
    tree = jax.tree.structure(problem.params)

    def value(w: list[Array], *lists: list[Any]) -> Any:
        whole = jax.tree.unflatten(tree, w), *given(*lists)
        with door.calling("loss(params, theta, batch)", *whole):
            return problem.loss(*whole)

    with without_mesh(problem.microbatches, arguments) as bare:
        program, constants = programs.trace(value, *bare)
    reject_on_mesh(problem.microbatches, problem.loss, constants)
    return program, constants


_KEY = jax.eval_shape(key_of_steps)


def _signals(
    problem: Problem, given: Callable[..., Any], arguments: Any, of_loss: list[Any], captured: tuple[bool, ...]
) -> tuple[Signals | None, list[Any]]:
    """What links see beside the gradient, and the constants of it that are not among the loss's."""
    if not (signals := problem.optimizer.signals):
        return None, []
    tree = jax.tree.structure(problem.params)
    # Mended here, since signals differentiate it.
    scalar = mending(problem.loss if problem.statistics is None else lambda *a: problem.loss(*a)[0])

    def signalled(w: list[Array], *lists: Any) -> Any:
        *rest, key = lists
        whole = jax.tree.unflatten(tree, w), *given(*rest)
        return {name: check_signal(name, function(scalar, *whole, key), tree) for name, function in signals.items()}

    with without_mesh(problem.microbatches, arguments) as bare:
        program, constants = programs.trace(signalled, *bare, _KEY)
    own = any(map(own_rule, equations(program.jaxpr)))
    key = Key((object(),)) if own else key_today(program)  # never the same again: rules are no part of a key
    floats = [x for x, traced in zip(of_loss, captured, strict=True) if traced]
    places = [next((i for i, y in enumerate(floats) if x is y), None) for x in constants]
    rest = [x for x, place in zip(constants, places, strict=True) if place is None]
    for x in rest:
        if isinstance(x, jax.core.Tracer):
            raise ValueError(
                "a signal of the optimizer reads a traced value from outside, whose derivative would be lost. Make it a "
                "part of theta, or of the parameters."
            )
    return Signals(tuple(signals), Program(mended(program.jaxpr), key, program.out), tuple(places)), rest


def _paths(name: str, tree: Any, chosen: Callable[[Any], bool]) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [name + jax.tree_util.keystr(path) for path, x in leaves if chosen(x)]


def with_foreign(run: Run, values: list[Floats], h: list[Hypers], statistics: Any) -> Run:
    """The run, with what the functions of rules that are not the library's compute, to be compared.

    values: initial ones; h: of one step; statistics: as rules read them. Such a function, or a derivative rule that it uses,
    may read something else today, like a loss; but nothing is differentiated in what it reads from outside.
    """
    found: list[Hashable] = []
    collective = False

    def note(what: str, function: Callable[..., Any], held_by: Any, *args: Any) -> None:
        nonlocal collective
        program, held = programs.trace(function, *args)
        collective |= reads_axes(program)
        key: Hashable = key_today(program)
        if any(map(own_rule, equations(program.jaxpr))):
            derived, held, axes = _derived(function, args) or (object(), held, False)
            key = key, derived
            collective |= axes
        for x in held:
            if isinstance(x, jax.core.Tracer):
                raise ValueError(
                    f"{what} reads the traced value {name_in(held_by, x)} from outside, whose derivative would be lost. "
                    "Make it a hyperparameter: a field of the optimizer."
                )
        found.append((key, tuple(array_key(x) for x in held)))

    wide = [jax.ShapeDtypeStruct(block.shape, block.dtype) for block in run.of_parameters]
    for block, own, hj in zip(run.of_parameters, values, h, strict=False):
        for link in block.chain:
            if link.increment is not None and foreign(link.increment):
                others = {name: x for name, x in own.items() if name != link.name}
                others |= {STATISTICS: statistics} if run.statistics else {}
                one = functools.partial(block.increment, link)
                note(f"the increment of link `{link.name}`", one, link.increment, hj, others, block.seen(link, own))
    for transform in run.transforms:
        if foreign(transform.function):
            links = [
                {name: jax.ShapeDtypeStruct(x.shape, block.dtype) for name, x in own.items()}
                for block, own in zip(run.of_parameters, values, strict=False)
            ]
            arguments = h[: len(wide)], wide, wide, links
            note(f"the transformation {transform.name}", transform.__call__, transform.function, *arguments)
    return dataclasses.replace(run, foreign=tuple(found) or None, collective=collective)


def rules_of(loss: Any, program: Program, constants: list[Any], arguments: Any) -> Rules | None:
    """What the derivative rules that the loss brings along compute, to the second order; None where it has none.

    They are no part of the loss as a program. A rule is a Python function like the loss: it may read something else today,
    and it may hold arrays, which are told by identity.
    """
    if not any(map(own_rule, equations(program.jaxpr))):
        return None

    def values(w: list[Array], theta: list[Array], constants: list[Any], *rest: Any) -> list[Array]:
        return jax.tree.leaves(program(constants, w, theta, *rest))  # the loss, and the evidence beside it

    w, theta, *rest = arguments
    none: Any = object(), [], False  # which is never the same again
    found, held, axes = _derived(values, (w, theta), constants, *rest) or none
    for x in held:  # by rules: the constants of the loss are arguments here
        if isinstance(x, jax.core.Tracer):
            raise ValueError(
                f"a derivative rule that `loss` ({name_of(loss)}) uses closes over the traced value {name_in(loss, x)}, "
                "whose derivative would be lost. Pass it to the function that has the rule as one of its arguments."
            )
    return Rules(found, tuple(array_key(x) for x in held), axes)


def _derived(function: Callable[..., Any], along: tuple[Any, ...], *rest: Any) -> tuple[Key, list[Any], bool] | None:
    """What the derivatives of function(*along, *rest) compute, to the second order if there is one, what they hold, and
    whether they read named axes. Where the second order cannot be traced, and may have rules of its own, none is like it.

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
            seen = order is second or not any(map(own_rule, equations(program.jaxpr)))
            return key_today(program) if seen else Key((object(),)), held, reads_axes(program)
    return None


def key_today(program: Program) -> Key:
    """The program's key; one that equals no other where it has a batching rule, which is no part of a key and may read
    something else at the next call."""
    return Key((object(),)) if any(map(own_batching, equations(program.jaxpr))) else program.key


def reads_axes(program: Program, rules: Rules | None = None) -> bool:
    """Whether it, or a derivative rule of its own, speaks of an axis that a `jax.vmap` around the run has named."""
    if rules is not None and rules.axes:
        return True
    return any(type(effect).__name__ == "NamedAxisEffect" for effect in program.jaxpr.effects)


def _symmetric(jaxpr: Jaxpr) -> bool:
    """Whether the Jacobian of the loss's gradient is symmetric for certain: it is where the gradient is one of something.

    A loss whose derivative rules are its own has a field in the place of a gradient, which may be the gradient of nothing. A
    `stop_gradient` is a constant to all derivatives, so that what is left is a gradient. Through floats of 8 bits a product
    with J is rounded to two or three of them, and one with its transpose otherwise: it is taken as JAX's reverse mode does.
    So it is where JAX has one of the two products alone (`_ONE_SIDED`).
    """
    certain = not any(own_rule(e) or e.primitive.name in _ONE_SIDED for e in equations(jaxpr))
    return certain and all(mantissa >= 7 for _, mantissa in _floats(jaxpr))


# Of a matrix they read one triangle, and their derivatives both: no field of a gradient, where it is not made symmetric
# before. And what has no second derivative in the parameter that theta may be.
_ONE_SIDED = {"cholesky", "eigh", "igamma", "igammac"}


def _narrow(jaxpr: Jaxpr) -> bool:
    return any(exponent < 8 for exponent, _ in _floats(jaxpr))


def _floats(jaxpr: Jaxpr) -> set[tuple[int, int]]:
    """(bits of the exponent, bits of the mantissa) of all floats in a program: float32 has 8 and 23, bfloat16 8 and 7."""
    dtypes = {x.aval.dtype for e in equations(jaxpr) for x in (*e.invars, *e.outvars) if is_float(x)}
    rounded = [e.params for e in equations(jaxpr) if e.primitive.name == "reduce_precision"]
    emulated = {(int(p["exponent_bits"]), int(p["mantissa_bits"])) for p in rounded}
    return emulated | {(jnp.finfo(x).nexp, jnp.finfo(x).nmant) for x in dtypes}
