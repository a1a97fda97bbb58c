"""What is trained, as `train` was given it.

Invariant: nothing here looks at it; `hypergrad/_set_up.py` checks it and takes it apart.
"""

from typing import Any, NamedTuple


class Problem(NamedTuple):
    """What is trained, as `train` was given it."""

    loss: Any
    params: Any
    optimizer: Any
    batches: Any
    theta: Any = None
    steps: Any = None
    state: Any = None
    statistics: Any = None
    metric: Any = None
    microbatches: Any = None
    past: Any = None  # the `Past` of a run that goes on from another
