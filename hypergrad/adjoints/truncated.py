"""`Truncated`: the derivative through the last steps of a run alone.

Invariant: of all steps it is that of `Reversible`; of fewer, that of the run that begins where they begin.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from hypergrad._integers import as_int
from hypergrad.adjoints.base import Adjoint, Cost
from hypergrad.adjoints.capacity import Given, given
from hypergrad.adjoints.reversible import Room, reversed_run
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Outcome


@dataclasses.dataclass(frozen=True)
class Truncated(Adjoint):
    """Reverse the last steps of the same training run, and take what came before them as given.

    last: how many; of more than the run has, all. The derivative is that of the last steps with respect to hyperparameters
    and theta (of values per step that come earlier: zero), and zero with respect to what the run begins with.
    It is biased (`exact` is False): what early steps do by way of the parameters is missing. The reverse pass takes
    `last` / `steps` of the time of `Reversible`'s, and ends on a check of the same kind, against the state that training had
    there. As truncated backpropagation through time (Williams and Peng 1990).
    """

    last: int
    capacity: int | Mapping[str, int] | Given = None
    fraction_bits: int | None = None
    isolate: bool | None = None

    exact: ClassVar[bool] = False
    cuts = True

    def __post_init__(self) -> None:
        last = as_int(self.last)
        if last is None or last < 1:
            raise ValueError(f"`last` of hg.Truncated must be an integer of at least 1; got {self.last!r}.")
        object.__setattr__(self, "last", last)
        object.__setattr__(self, "capacity", given(self.capacity))  # a value that can be hashed

    @property
    def guesses(self) -> bool:  # type: ignore[override]
        return not isinstance(self.capacity, int)

    def left_out(self, steps: int) -> str:
        return f"what the first {steps - self.last} of {steps} steps do to the parameters" if self.last < steps else ""

    def begins_at(self, steps: int) -> int:
        return max(steps - self.last, 0)

    def run(self, run: Run, inputs: Inputs) -> Outcome:
        late = dataclasses.replace(run, first=self.begins_at(run.steps))
        return reversed_run(late, Room(given(self.capacity)), inputs)

    def cost(self, steps: int) -> Cost:
        share = min(self.last / steps, 1.0)
        return Cost(time=1 + 3 * share, states=7 + 0.005 * steps, activations=1)
