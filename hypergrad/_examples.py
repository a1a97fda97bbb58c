"""Whether a loss is a mean over the examples of its batch, for rules that see examples.

Invariant: it is asked at the door, of values alone: nothing of it is in the program of training.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hypergrad import _programs as programs
from hypergrad._problem import Problem
from hypergrad._processes import several
from hypergrad.curvature._means import no_mean
from hypergrad.optimizers.expand import concrete
from hypergrad.schedules import PerStep, spread


def check_examples(problem: Problem, given: Any, key: Hashable) -> None:
    """That the loss is a mean over the examples of the first batch, in one process, once for each program.

    given: all arrays that training is made of. Values that are traced (`jax.jit`, `hg.optimize`) are made up; integers,
    which may be labels, are not, so that nothing is said of a batch that has traced ones. key: what the signals compute.
    """
    if several():
        return
    traced = tuple(not concrete(x) for x in jax.tree.leaves((given, problem.params)))

    def check() -> None:
        told = _told_of_made_up(problem) if any(traced) else _told(problem)
        if told is not None:
            raise ValueError(told)

    programs.kept((check_examples, traced, key), check)


def _told(problem: Problem) -> str | None:
    with jax.ensure_compile_time_eval():  # in a program that is being built, too
        theta = jax.tree.map(_of_first_step, spread(problem.theta), is_leaf=_is_per_step)
        batch = problem.batches(jnp.int32(0))
    return no_mean(_value(problem), problem.params, theta, batch)


def _told_of_made_up(problem: Problem) -> str | None:
    """None also where the loss cannot be computed apart from the caller's program."""
    try:
        with jax.ensure_compile_time_eval():
            params = jax.tree.map(lambda x: _made_up(x, _fan_in(x)), problem.params)
            theta = jax.tree.map(_of_first_step, spread(problem.theta), is_leaf=_is_per_step)
            batch = _of_made_up(jax.tree.map(_made_up, problem.batches))(jnp.int32(0))
            where = " with numbers made up for those that are traced,"
            return no_mean(_of_made_up(_value(problem)), params, theta, batch, where)
    except Exception:  # of named axes, integers, meshes; an error of the loss's own has been raised when it was traced
        return None


def _value(problem: Problem) -> Callable[..., Any]:
    return problem.loss if problem.statistics is None else lambda *a: problem.loss(*a)[0]


def _of_first_step(x: Any) -> Any:
    return _made_up(x.values)[0] if isinstance(x, PerStep) else _made_up(x)


def _is_per_step(x: Any) -> bool:
    return isinstance(x, PerStep)


def _of_made_up(function: Callable[..., Any]) -> Callable[..., Any]:
    """function, with made-up values for traced ones that it closes over."""

    def of_given(*args: Any) -> Any:
        program, constants = programs.trace(function, *args)
        return program([_made_up(x) for x in constants], *args)

    return of_given


def _made_up(x: Any, fan_in: int | None = None) -> Any:
    """x, or where it is traced: floats between 0.2 and 0.8, which may be probabilities, scales and rates; of a layer with so
    many inputs, of a normal distribution of deviation fan_in^-1/2."""
    if not isinstance(x, jax.core.Tracer):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0, impl=jax.random.key_impl(x)), x.shape)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError("integers that are traced may be anything")
    random = np.random.default_rng(x.size)
    values = random.uniform(0.2, 0.8, x.shape) if fan_in is None else random.normal(size=x.shape) / math.sqrt(fan_in)
    return jnp.asarray(values, x.dtype)


def _fan_in(x: Any) -> int:
    return max(x.size // x.shape[-1], 1) if x.ndim > 1 and x.shape[-1] else 100
