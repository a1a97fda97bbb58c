"""Where a run is cut: between which steps the stacks of lost digits are emptied.

Invariant: segments lie side by side from the first step to the last, and all but the last have `stride` steps.
"""

import math
from typing import Any


STORED = 256  # steps of a segment whose words go elsewhere, or about as many


class InSegments:
    """What follows from how a `Run` is cut."""

    steps: int
    store: Any
    first: int
    segments: tuple[int, ...]
    every: int | None

    @property
    def undone(self) -> int:
        """The step that the reverse pass ends with."""
        return 0 if self.segments else self.first

    @property
    def emptied(self) -> list[int]:
        """The steps before which stacks are empty."""
        if self.store is not None:
            return list(range(0, self.steps, self.stride))
        return [*(range(0, self.first, self.stride) if self.segments else ()), self.first]

    @property
    def in_segments(self) -> bool:
        """Whether stacks are emptied on the way."""
        return self.store is not None or self.first > 0

    @property
    def stride(self) -> int:
        """Steps of each segment but the last."""
        if self.store is not None:
            return self.every or -(-self.steps // -(-self.steps // STORED))
        return self.first // math.prod(self.segments) if self.first else self.steps

    @property
    def longest(self) -> int:
        """The most steps between two at which stacks are empty."""
        if self.store is not None:
            return self.stride
        return max(self.steps - self.first, self.stride if self.segments else 0)
