"""Two ways to repeat a step: one compiled scan, or a host loop over a jitted (or, for host buffers, plain) step.

Invariant: a driver only repeats: `carry, ys = body(consts, carry, x)` for every x of xs, in order or in reverse.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hypergrad import _programs as programs
from hypergrad._isolation import kernel_by_kernel, unseen
from hypergrad.run import pieces


Body = Callable[[Any, Any, Any], tuple[Any, Any]]  # (consts, carry, x) -> (carry, y)
Progress = Callable[[str, int, int], Any]  # (direction, steps done, steps)


@dataclasses.dataclass(frozen=True)
class Between:
    """What a host loop does between its steps."""

    feed: Callable[[int], list[Any]] | None = None  # t -> the last `fed` leaves of `consts`, for step t
    fed: int = 0
    progress: Progress | None = None  # called at the start, now and then, and at the end
    first: int = 0  # the step that the loop begins with
    steps: int | None = None  # of the run; None: of the loop


SECONDS_BETWEEN_REPORTS = 0.5


def scan(body: Body, consts: Any, carry: Any, xs: Any, reverse: bool = False) -> tuple[Any, Any]:
    """One loop over xs = (t, ...)."""
    held = (consts, carry, xs)
    if len(xs[0]) == 1:  # XLA has no loop of one step: it would know t, and take every branch that hides something from it
        xs = (jnp.where(unseen(), xs[0], -1), *xs[1:])
    return jax.lax.scan(lambda c, x: body(consts, c, (kernel_by_kernel(x[0], held), *x[1:])), carry, xs, reverse=reverse)


def host(
    body: Body,
    name: Hashable,
    consts: Any,
    carry: Any,
    xs: Any,
    reverse: bool = False,
    between: Between = Between(),  # noqa: B008
) -> tuple[Any, Any]:
    """A Python loop over one jitted step: XLA runs convolutions on all cores there, in a scan on one.

    The step takes slice t of `xs` and writes row t of `ys`; t counts on the device, and all that changes is donated. name:
    equal for bodies that do the same, which share what is compiled.
    """
    steps = jax.tree.leaves(xs)[0].shape[0]
    inputs, (leaves, tree) = jax.tree.leaves(xs), jax.tree.flatten(carry)
    fixed, fed = jax.tree.leaves(consts), []
    del fixed[len(fixed) - between.fed :]

    def make() -> tuple[Any, Any]:
        like = jax.tree.map(_struct, carry), jax.tree.map(lambda x: _struct(x, x.shape[1:]), xs)
        program, constants = programs.trace(body, consts, *like)
        step = functools.partial(_step, program, constants, reverse)
        given = jax.tree.leaves(consts)
        cut = len(given) - between.fed
        moving = jax.eval_shape(functools.partial(_begin, 0, steps, _rows(program.out[1])), jax.tree.leaves(like[0]))
        return pieces.compiled(step, (inputs, given[:cut]), given[cut:], moving), program.out[1]

    step, out = programs.kept((name, reverse, between.fed, *programs.alike((consts, carry, xs))), make)
    moving = _begin(steps - 1 if reverse else 0, steps, _rows(out), leaves)
    for t in _watched(between, steps, reverse, lambda: moving[0]):  # noqa: B023 (whatever it is by then)
        if between.feed is not None:
            fed = between.feed(between.first + t)
        moving = step((inputs, fixed), fed, moving)
    return jax.tree.unflatten(tree, moving[1]), jax.tree.unflatten(jax.tree.structure(out), moving[2])


def host_eager(
    body: Body,
    consts: Any,
    carry: Any,
    xs: Any,
    reverse: bool = False,
    between: Between = Between(),  # noqa: B008
) -> tuple[Any, Any]:
    """A Python loop over the plain step, for buffers that live in Python."""
    steps = jax.tree.leaves(xs)[0].shape[0]
    leaves, tree = jax.tree.flatten(consts)
    ys: list[Any] = [None] * steps
    for t in _watched(between, steps, reverse, lambda: ys[-1 if reverse else 0]):
        if between.feed is not None:
            consts = jax.tree.unflatten(tree, leaves[: -between.fed] + between.feed(between.first + t))
        carry, ys[t] = body(consts, carry, jax.tree.map(lambda x: x[t], xs))  # noqa: B023 (used at once)
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)


def _step(program: programs.Program, constants: list[Any], reverse: bool, constant: Any, fed: list[Any], moving: Any) -> Any:
    (inputs, fixed), (t, carry, ys) = constant, moving
    x = [jax.lax.dynamic_index_in_dim(a, t, 0, keepdims=False) for a in inputs]
    out = program.flat(constants, [*fixed, *fed, *carry, *x])
    news = [jax.lax.convert_element_type(new, old.dtype) for new, old in zip(out, carry, strict=False)]  # not weak
    rows = [jax.lax.dynamic_update_index_in_dim(a, y, t, 0) for a, y in zip(ys, out[len(carry) :], strict=True)]
    return t - 1 if reverse else t + 1, news, rows


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _begin(t: int, steps: int, rows: Any, carry: list[Any]) -> tuple[Array, list[Array], list[Array]]:
    """What the steps may overwrite: t, a copy of the carry, room for `ys`."""
    return (
        jnp.int32(t),
        [jnp.array(x, dtype=x.dtype, copy=True) for x in carry],
        [jnp.zeros((steps, *shape), dtype) for shape, dtype in rows],
    )


def _rows(out: Any) -> tuple[Any, ...]:
    return tuple((y.shape, y.dtype) for y in jax.tree.leaves(out))


def _struct(x: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, x.dtype)


def _watched(between: Between, steps: int, reverse: bool, latest: Callable[[], Any]) -> Iterator[int]:
    """The steps in order, reported as they get done: at the start, now and then, and at the end."""
    order = reversed(range(steps)) if reverse else range(steps)
    if between.progress is None:
        yield from order
        return
    direction, told = "reverse" if reverse else "forward", -math.inf
    total = between.steps or steps
    before = total - between.first - steps if reverse else between.first
    for done, t in enumerate(order):
        if time.perf_counter() - told >= SECONDS_BETWEEN_REPORTS:
            jax.block_until_ready(latest())
            between.progress(direction, before + done, total)
            told = time.perf_counter()
        yield t
    jax.block_until_ready(latest())
    between.progress(direction, before + steps, total)
