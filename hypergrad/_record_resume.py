"""A state of a recorded run, as another run that goes on from there has it.

Invariant: what is taken over has the integers of the recorded run, in units that the other run has too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hypergrad.run.by_leaf import by_leaf, decays_of, laid_out, links_of
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Noted
from hypergrad.run.step import State


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
    """`noted.sizes` of the run before, for the blocks of the other: of each at least what its leaves had."""
    assert noted.sizes is not None
    of_leaf = {leaf: size for block, size in zip(before.of_parameters, noted.sizes, strict=True) for leaf in block.leaves}
    return jnp.stack([jnp.stack([of_leaf[leaf] for leaf in block.leaves]).max() for block in run.of_parameters])


def _shapes(state: State) -> Any:
    return jax.tree.structure(state), [x.shape for x in jax.tree.leaves(state)]
