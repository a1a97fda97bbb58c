"""A step as several programs: what must be compiled by itself, and what stands between.

Invariant: the pieces, one after the other, compute what the whole computes; calls of `alone` whose functions compute the
same run one executable, in whichever step they stand.

So what is `alone` has the same bits in both passes by construction, and XLA:CPU gives its convolutions all cores, which it
does not inside a branch.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from hypergrad import _programs as programs
from hypergrad._program_keys import key_of


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """function, as a program of its own where a step is `compiled`."""

    def call(*args: Any) -> Any:
        program, constants = programs.trace(function, *args)
        leaves = jax.jit(functools.partial(_hypergrad_alone, program))(constants, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(program.out), leaves)

    return call


def _hypergrad_alone(program: programs.Program, constants: list[Any], leaves: list[Any]) -> list[Any]:
    return program.flat(constants, leaves)


def _is_alone(e: JaxprEqn) -> bool:
    return e.primitive.name == "jit" and e.params["name"] == _hypergrad_alone.__name__


class Piece(NamedTuple):
    run: Callable[..., list[Any]]  # compiled
    reads: list[Var]
    writes: list[Any]


def compiled(step: Callable[..., Any], fixed: Any, fed: list[Any], moving: Any) -> Callable[..., Any]:
    """step(fixed, fed, moving) -> what has moved, whose memory is that of `moving`: for arrays like these."""
    whole = jax.make_jaxpr(step)(fixed, fed, moving)
    if not any(map(_is_alone, whole.jaxpr.eqns)):
        return programs.compiled(step, donate=(2,))
    count, tree = len(jax.tree.leaves(moving)), jax.tree.structure(moving)
    pieces, held = list(_pieces(whole, count)), dict(zip(whole.jaxpr.constvars, whole.consts, strict=True))

    def run(*args: Any) -> Any:
        known = held | dict(zip(whole.jaxpr.invars, jax.tree.leaves(args), strict=True))
        for piece in pieces:
            known.update(zip(piece.writes, piece.run(*map(known.__getitem__, piece.reads)), strict=True))
        return jax.tree.unflatten(tree, [x.val if isinstance(x, Literal) else known[x] for x in whole.jaxpr.outvars])

    return run


def _pieces(whole: ClosedJaxpr, count: int) -> Iterator[Piece]:
    """count: of what moves, the last inputs and all outputs, place by place. The last piece takes their memory."""
    jaxpr = whole.jaxpr
    groups = [list(g) for _, g in itertools.groupby(enumerate(jaxpr.eqns), lambda e: e[0] if _is_alone(e[1]) else -1)]
    wanted = [{x for x in jaxpr.outvars if isinstance(x, Var)}]  # after each group, the last first
    for group in reversed(groups):
        wanted.append(wanted[-1] | {x for _, e in group for x in e.invars if isinstance(x, Var)})
    for group, after in zip(groups, wanted[-2::-1], strict=True):
        equations = [e for _, e in group]
        made = {x for e in equations for x in e.outvars}
        reads = list(dict.fromkeys(x for e in equations for x in e.invars if isinstance(x, Var) and x not in made))
        writes = [x for e in equations for x in e.outvars if x in after]
        if _is_alone(equations[0]):
            (equation,) = equations
            yield Piece(_executable(equation.params["jaxpr"], equation.invars, reads), reads, list(equation.outvars))
            continue
        moved = zip(jaxpr.invars[len(jaxpr.invars) - count :], jaxpr.outvars, strict=True)
        given = {old for old, new in moved if new in made} if group is groups[-1] else set()
        part = jaxpr.replace(constvars=[], invars=reads, outvars=writes, eqns=equations)
        donated = tuple(i for i, x in enumerate(reads) if x in given)
        yield Piece(programs.compiled(functools.partial(jax.core.eval_jaxpr, part, []), donated), reads, writes)


def _executable(function: ClosedJaxpr, arguments: list[Any], reads: list[Var]) -> Callable[..., list[Any]]:
    """Of a call that is `alone`, as a function of the variables that it reads."""
    assert not function.consts, "its constants are arguments"
    make = lambda: programs.compiled(functools.partial(jax.core.eval_jaxpr, function.jaxpr, []))  # noqa: E731
    call = programs.kept((alone, key_of(function.jaxpr)), make)
    if reads == arguments:
        return call
    return lambda *values: call(*[x.val if isinstance(x, Literal) else values[reads.index(x)] for x in arguments])
