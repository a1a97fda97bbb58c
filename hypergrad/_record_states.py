"""States of a recorded run that are kept now and then, so that the way back begins near.

Invariant: their arrays take no more bytes than the budget.
"""

import jax

from hypergrad.adjoints.budget import bytes_of, shown_bytes
from hypergrad.run.spec import Run
from hypergrad.run.step import State


MOST = 10_000  # of which record.json has room for the checksums


def file_of(step: int | str) -> str:
    return f"state-{step}.npz"


def stops(run: Run, state: State, budget: int | str | None) -> list[int]:
    """The steps after which a state is kept: between segments, evenly, as many as the budget holds, `MOST` at most."""
    if budget is None:
        return []
    size, room = sum(x.nbytes for x in jax.tree.leaves(state)), bytes_of(budget, "states_budget")
    if room < size:
        raise ValueError(
            f"states_budget={shown_bytes(room)} holds no state of this run: the smallest that works is {size} bytes. "
            "states_budget=None keeps the end alone."
        )
    between = run.emptied[1:]
    count = min(room // size, len(between), MOST)
    return [between[(i + 1) * (len(between) + 1) // (count + 1) - 1] for i in range(count)]
