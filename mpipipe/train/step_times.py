"""The time that steps of a training took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepTimes:
    """Time that one rank spent in some steps.

    Attributes
    ----------
    steps : number of them
    seconds : by the host's clock
    busy, elapsed : seconds that the pipeline measured
    """

    steps: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    elapsed: float = 0.0

    def add(self, seconds: float, busy: float, elapsed: float) -> None:
        """Count one more step."""
        self.steps += 1
        self.seconds += seconds
        self.busy += busy
        self.elapsed += elapsed
