"""What is measured at each step of training: from the user's function to the program of it.

Invariant: the function is called here, when training is entered, and never again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from hypergrad import _door as door
from hypergrad import _programs as programs
from hypergrad._closures import name_in, name_of
from hypergrad._mended import mended
from hypergrad._programs import Program
from hypergrad._trace import Traced, key_today, reads_axes, rules_of
from hypergrad.hypers import describe
from hypergrad.optimizers.block import Block, Floats
from hypergrad.optimizers.chain import PARAMS, Optimizer
from hypergrad.optimizers.initial import final_state
from hypergrad.run.functions import Metrics
from hypergrad.schedules import PerStep, spread


CALL = "metric(params, theta, batch, state, hypers)"


def measured(
    traced: Traced,
    metric: Callable[..., Any],
    optimizer: Optimizer,
    steps: int,
    blocks: tuple[Block, ...],
    values: list[Floats],
    tree: Any,
) -> Traced:
    """With the metric among the functions, and the float leaves of the optimizer, which it reads, at the end of theta.

    blocks: of the parameters; values: of each block, initial ones; tree: of the parameters.
    """
    whole, stepped = door.theta_by_steps(_in_floats(optimizer), steps, "optimizer")
    floats, others = eqx.partition(whole, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(floats)

    def of_step(values: list[Floats], floats: list[Any], arrays: list[Any], batch: list[Any]) -> Any:
        own = eqx.combine(jax.tree.unflatten(structure, floats[len(floats) - len(leaves) :]), others)
        state = final_state(blocks, values, tree)
        theta, batch = traced.given(floats[: len(floats) - len(leaves)], arrays, batch)
        arguments = state.pop(PARAMS), theta, batch, state, own
        with door.calling(CALL, *arguments):
            return _checked(metric(*arguments))

    given, arrays, batch = traced.like
    at_a_step = [jax.ShapeDtypeStruct(x.shape[1:] if s else x.shape, x.dtype) for x, s in zip(leaves, stepped, strict=True)]
    arguments = _like(blocks, values), [*given, *at_a_step], arrays, batch
    program, held = programs.trace(of_step, *arguments)
    captured = traced.theta[len(given) :]
    places = tuple(next((i for i, y in enumerate(captured) if x is y), None) for x in held)
    rest = [x for x, place in zip(held, places, strict=True) if place is None]
    _reject_traced(metric, rest)
    kernels = Program(mended(program.jaxpr), key_today(program), program.out)
    found = Metrics(kernels, places, len(leaves), rules_of(metric, program, held, arguments))
    return _among(traced, found, leaves, stepped, rest)


def _in_floats(optimizer: Optimizer) -> Any:
    """With what is `PerStep` of integers in floats, as rules read it."""

    def floats(x: Any) -> Any:
        whole = eqx.is_array_like(x) and jnp.issubdtype(jnp.result_type(x), jnp.integer)
        return jnp.asarray(x, float) if whole else x

    one = lambda x: jax.tree.map(floats, x) if isinstance(x, PerStep) else x  # noqa: E731
    return jax.tree.map(one, spread(optimizer), is_leaf=lambda x: isinstance(x, PerStep))


def _like(blocks: tuple[Block, ...], values: list[Floats]) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """The values of the blocks of the parameters, as a step has them."""
    return [
        {k.name: jax.ShapeDtypeStruct(x[k.name].shape, b.leaf_dtype if k.name == PARAMS else b.dtype) for k in b.chain}
        for b, x in zip(blocks, values, strict=False)
    ]


def _reject_traced(metric: Callable[..., Any], arrays: list[Any]) -> None:
    for x in arrays:
        if isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact):
            raise ValueError(
                f"`metric` ({name_of(metric)}) reads the traced value {name_in(metric, x)} from outside, whose derivative "
                "would be lost. Make it a part of theta."
            )


def _among(traced: Traced, found: Metrics, leaves: list[Any], stepped: Any, rest: list[Any]) -> Traced:
    """With the metric among the functions. leaves: of the optimizer, which it reads, whether each is per step; rest: arrays
    that it closes over."""
    theta = dataclasses.replace(traced.functions.theta, stepped=(*traced.functions.theta.stepped, *stepped))
    frozen = traced.frozen._replace(metrics=[programs.owned(x) for x in rest])
    before = len(traced.frozen.theta) + len(traced.frozen.loss) + len(traced.frozen.signals)
    return traced._replace(
        functions=dataclasses.replace(
            traced.functions,
            metrics=found,
            theta=theta,
            collective=traced.functions.collective or reads_axes(found.program, found.rules),
        ),
        theta=[*traced.theta, *leaves],
        frozen=frozen,
        names=(*traced.names[:before], *("what the metric closes over" for _ in rest), *traced.names[before:]),
    )


def _checked(given: Any) -> Any:
    """What a metric gave: a pytree of float scalars."""
    leaves = jax.tree_util.tree_leaves_with_path(given)
    if not leaves:
        raise TypeError(f"`metric` must return a float scalar, or a pytree of them; got {describe(given)}.")
    for path, x in leaves:
        if jnp.shape(x) != () or not eqx.is_array_like(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            got = door.shaped(jnp.asarray(x)) if eqx.is_array_like(x) else describe(x)
            raise TypeError(
                f"`metric` must return float scalars, one for each step; got {got} in result{jax.tree_util.keystr(path)}."
            )
    return jax.tree.map(jnp.asarray, given)
