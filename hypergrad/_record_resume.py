"""A state of a recorded run, as another run that goes on from there has it.

Invariant: what is taken over has the integers of the recorded run, in units that the other run has too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad._record_files import End, begin, outcome_of
from hypergrad.run.by_leaf import by_leaf, decays_of, laid_out, links_of
from hypergrad.run.forward import forward, steps_of
from hypergrad.run.plan import Plan, Span
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Noted, Outcome, note
from hypergrad.run.step import State


def gone_on(run: Run, inputs: Inputs, before: tuple[Run, Inputs], end: End, state: State, step: int) -> Outcome:
    """What the other run comes to. end: of the run before; state: after so many of its steps."""
    plan, first, _ = begin(run, inputs)
    state = taken_over(run, inputs, first, before, state, step)
    losses, sizes = end.losses[:step], sizes_so_far(run, before[0], end.noted)
    if length := run.steps - step:
        state, late, of_late = run.segment(_train_on, inputs, plan, state, jnp.int32(step), static=(length,))
        losses, sizes = jnp.concatenate([losses, late]), jnp.maximum(sizes if step else 0, of_late)
    return outcome_of(run, inputs, plan, state, losses, note(run, losses, sizes[None], 0))


def _train_on(run: Run, length: int, inputs: Inputs, plan: Plan, state: State, first: Array) -> tuple[State, Array, Array]:
    """(the end, the losses, the largest of `sizes` of gradients), of a run that is in one piece."""
    xs = Span(first, length).of(steps_of(run, inputs, [schedule.entries for schedule in plan]))
    end, seen, sizes = forward(run, inputs, state, xs)
    return end, seen.losses, sizes.max(axis=0)


def taken_over(run: Run, inputs: Inputs, first: State, before: tuple[Run, Inputs], state: State, step: int) -> State:
    """The state of the run before after so many steps. first: a state of the run that takes it."""
    if links_of(run) != links_of(before[0]):
        raise ValueError("`optimizer` must have the accumulators of the recorded run; it has others.")
    state = laid_out(run, by_leaf(before[0], state))
    if _shapes(first) != _shapes(state):
        raise ValueError(
            "`optimizer` must have the accumulators of the recorded run, of the same shapes, and their decays in "
            "the form that they had: one number for a leaf, or one for each weight."
        )
    there, here = decays_of(*before), decays_of(run, inputs)
    for link, old in there.items():
        if link not in here or not np.array_equal(old[:step], here[link][:step]):
            raise ValueError(
                f"the decays (momenta) of the steps before {step} must be those of the recorded run, in whose units its "
                "state is; change them from there on, by hg.PerStep."
            )
    return state


def sizes_so_far(run: Run, before: Run, noted: Noted) -> Array:
    """`noted.sizes` of the run before, for the parts of the other: of each at least what its leaves had."""
    assert noted.sizes is not None
    there, here = ([part for block in one.of_parameters for part in block.parts] for one in (before, run))
    of_leaf = {leaf: size for part, size in zip(there, noted.sizes, strict=True) for leaf in part}
    return jnp.stack([jnp.stack([of_leaf[leaf] for leaf in part]).max() for part in here])


def _shapes(state: State) -> Any:
    return jax.tree.structure(state), [x.shape for x in jax.tree.leaves(state)]
