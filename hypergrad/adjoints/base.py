"""What every adjoint is: a way to the derivative of one and the same training run.

Invariant: adjoints give the same forward numbers, and those that are `exact` the same derivative.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from hypergrad.batches import HostBatches
from hypergrad.run.spec import Inputs, Run
from hypergrad.run.status import Outcome
from hypergrad.run.stores import Store


class Cost(NamedTuple):
    """Of a hypergradient: an estimate for a rule of two links and momentum 0.9, not a measurement."""

    time: float  # in trainings without a derivative
    states: float  # parameters and accumulators kept at once, in copies
    activations: float  # of one step of training, kept at once


class Adjoint(abc.ABC):
    """How the derivative of training is computed. Subclasses are frozen dataclasses: their fields are in the key of what is
    compiled.

    `run` trains by `hypergrad.run.forward.forward`, which runs over any range of steps, and gives an `Outcome` that JAX can
    differentiate. One that reverses goes back by `hypergrad.adjoints.segments.Way`, also over any range, from the state
    after it to the state before it, and compares that with what it was.
    """

    exact: ClassVar[bool] = True  # whether the derivative is that of the whole run
    fraction_bits: int | None = None  # of the grid of the parameters; None: by their dtype
    isolate: bool | None = False  # whether gradients are compiled apart from their derivatives; None: where needed
    buffer: Any = "device"  # where lost digits go: "device", "host", "gmpy2"
    store: Store | None = None  # where those of a segment wait, off the device
    guesses: bool = False  # whether it sets room aside for digits that nobody has counted yet
    cuts: bool = False  # whether it does so for some steps of a run, and not for all
    driver_name: str | None = "scan"  # what repeats the step: "scan", "host", "host_eager"; None: whichever suits
    progress: Callable[[str, int, int], Any] | None = None  # told by host drivers how far they are

    @abc.abstractmethod
    def run(self, run: Run, inputs: Inputs) -> Outcome: ...

    @property
    def loads(self) -> bool:
        """Whether Python can load batches between its steps."""
        return self.driver_name in (None, "host", "host_eager")

    def driver_for(self, source: HostBatches | None) -> str | None:
        """What repeats the step, of batches that Python loads from there; None: whichever suits."""
        if source is not None and not self.loads:
            raise ValueError(
                "hg.host_batches loads from Python while training runs, which a scan cannot: take adjoint=hg.Reversible() "
                '(or driver="host"), or stack the batches with hg.stacked.'
            )
        return self.driver_name

    def begins_at(self, steps: int) -> int:
        """The first step that the derivative of a run of so many goes through; what came before is given."""
        del steps
        return 0

    def left_out(self, steps: int) -> str:
        """What the derivative of a run of so many steps does not have, a phrase for the status."""
        return ""

    @abc.abstractmethod
    def cost(self, steps: int) -> Cost: ...
