"""The meta-optimizer: from a point and what was evaluated there to the next point.

Invariant: a `Descent` made of the same arguments has the same `fingerprint`, in any process.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

from hypergrad import _programs as programs
from hypergrad._average import Evaluated
from hypergrad._evaluate import Evaluation
from hypergrad._record_prints import print_of_program
from hypergrad._report import listen


class Point(NamedTuple):
    """Where a meta-step starts from."""

    learned: Any  # unconstrained
    state: Any  # of the meta-optimizer


# Their secant pairs and trial points compare values at different hypers, which are comparable under one key only.
_NEED_ONE_KEY = (
    optax.ScaleByLBFGSState,
    optax.ScaleByZoomLinesearchState,
    optax.ScaleByBacktrackingLinesearchState,
)


class Descent:
    """h, s <- h + u, s'  where  u, s' = meta_optimizer.update(df/dh, s, h)."""

    def __init__(self, meta_optimizer: optax.GradientTransformation, evaluation: Evaluation) -> None:
        self.meta_optimizer, self.evaluation = optax.with_extra_args_support(meta_optimizer), evaluation

    def start(self, learned: Any) -> Point:
        """With numbers of Python in the state as arrays: of the same type at every update, and from a folder."""
        state = self.meta_optimizer.init(learned)
        return Point(learned, jax.tree.map(lambda x: _array(x) if eqx.is_array_like(x) else x, state))

    def one_key(self, point: Point) -> bool:
        """Whether every meta-step must see the same key."""
        leaves = jax.tree.leaves(point.state, is_leaf=lambda x: isinstance(x, _NEED_ONE_KEY))
        return any(isinstance(x, _NEED_ONE_KEY) for x in leaves)

    def __call__(self, point: Point, fixed: Any, evaluated: Evaluated, key: Array) -> Point:
        """One update; a line search evaluates in it, and what fails there is a value that it turns away from."""
        ledger = self.evaluation.ledger
        ledger.clear()
        arguments = point, fixed, evaluated.value, evaluated.grads, key, evaluated.ok
        with listen(ledger):
            after, reports = jax.block_until_ready(self.evaluation.compiled(self._update, *arguments)(*arguments))
            programs.told(reports)
        return self(point, fixed, evaluated, key) if self.evaluation.grown() else after

    def _update(self, point: Point, fixed: Any, value: Array, grads: Any, key: Array, ok: Array) -> Point:
        return self._updated(point, value, grads, lambda h: self.evaluation.value(h, fixed, key, ok))

    def _updated(self, point: Point, value: Array, grads: Any, value_fn: Any) -> Point:
        # Transformations that search along a line take the last three; the others let them pass.
        updates, state = self.meta_optimizer.update(
            grads, point.state, point.learned, value=value, grad=grads, value_fn=value_fn
        )
        return Point(optax.apply_updates(point.learned, updates), state)

    def fingerprint(self, point: Point) -> str:
        """A digest of the update as a program, its constants included: the same for the same meta-optimizer."""
        bowl = lambda h: sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(h))  # noqa: E731
        program = jax.make_jaxpr(lambda p, v, g: self._updated(p, v, g, bowl))(point, jnp.float32(0), point.learned)
        return print_of_program(program.jaxpr, program.consts)


def _array(x: Any) -> Array:
    strong = isinstance(x, jax.Array) and not getattr(x, "weak_type", False)
    return x if strong else jnp.array(x, jnp.result_type(x))  # an explicit dtype is never weak, as none from a folder is
