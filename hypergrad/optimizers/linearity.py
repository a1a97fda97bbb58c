"""Whether a rule that is said to be linear is: whether the cotangent of the gradient is a function of those of the links.

Invariant: where `linear_in_gradient` holds, that function is made of hyperparameters and of what is known when a step's
parameters have been undone and nothing else has: the new values of links that come before.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from hypergrad.optimizers.block import Block, Floats
from hypergrad.optimizers.chain import PARAMS, Link, foreign
from hypergrad.optimizers.expand import Hypers


def linear_in_gradient(blocks: Sequence[Block], h: list[Hypers], values: list[Floats]) -> bool:
    """Of rules that say so: it is looked for in those that are not the library's, since a class may inherit what it says."""
    for block, hj, own in zip(blocks, h, values, strict=True):
        like = {name: jax.ShapeDtypeStruct(x.shape, block.dtype) for name, x in own.items()}
        for link in block.chain[:-1]:
            if link.increment and foreign(link.increment) and not _is_linear(block, link, hj, like):
                return False
    return True


def _is_linear(block: Block, link: Link, h: Hypers, z: Floats) -> bool:
    """Whether the increment's derivative along the gradient reads hyperparameters alone; and that along the links before it
    neither the gradient nor the links after it, which have their old values only when they are undone."""
    before = {k.name for k in block.chain[: block.chain.index(link)]}
    others = {k: x for k, x in z.items() if k not in (link.name, PARAMS)}
    early, late = ({k: x for k, x in others.items() if (k in before) is first} for first in (True, False))
    params = {PARAMS: z[PARAMS]}

    def increment(h: Hypers, params: Floats, early: Floats, late: Floats, g: Any) -> Any:
        return block.increment(link, h, {**params, **early, **late}, g)

    arguments = h, params, early, late, block.seen(link, z)
    _, *values = _read_by_derivative(increment, 4, arguments)
    _, _, _, later, gradient = _read_by_derivative(increment, 2, arguments)
    return not (any(values) or later or gradient)


def _read_by_derivative(function: Callable[..., Any], place: int, arguments: tuple[Any, ...]) -> list[bool]:
    """Of each argument, whether the function's derivative along the one at `place` reads it."""

    def along(arguments: tuple[Any, ...], direction: Any) -> Any:
        moved = lambda x: function(*arguments[:place], x, *arguments[place + 1 :])  # noqa: E731
        return jax.jvp(moved, (arguments[place],), (direction,))[1]

    program = jax.make_jaxpr(along)(arguments, arguments[place]).jaxpr
    needed = {x for x in program.outvars if not isinstance(x, Literal)}
    for e in reversed(program.eqns):
        if not needed.isdisjoint(e.outvars):
            needed |= {x for x in e.invars if not isinstance(x, Literal)}
    variables = iter(program.invars)
    return [any([next(variables) in needed for _ in jax.tree.leaves(x)]) for x in arguments]
