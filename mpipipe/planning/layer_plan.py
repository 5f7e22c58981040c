"""The cut of a model into stages: a schedule, and the layers of each of its stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from mpipipe import nn
from mpipipe.adapters import as_layer
from mpipipe.planning.predict import Choice
from mpipipe.schedules import Schedule


@dataclass(frozen=True)
class LayerPlan:
    """The schedule of the pipelines, (start, stop) of the layers of each logical stage, and the rows of a replica.

    `rows` are the samples of a step in each replica.
    """

    schedule: Schedule
    layer_ranges: list[tuple[int, int]]
    rows: int

    @classmethod
    def of(cls, choice: Choice, ranks: int, rows: int, trained: Collection[int]) -> LayerPlan:
        """Return what `choice` decides for `ranks` ranks; `trained` are the layers with something to train."""
        return cls(choice.schedule_of(ranks, trained), choice.ranges, rows)

    @property
    def microbatch_rows(self) -> int:
        """Number of samples of the largest micro-batch."""
        return -(-self.rows // self.schedule.microbatches)

    def ranges_of(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the layers of each stage of one rank of a pipeline."""
        return [self.layer_ranges[stage] for stage in self.schedule.stages_of(rank)]

    def layers_of(self, rank: int) -> list[int]:
        """Return the places in the model of all layers of one rank of a pipeline."""
        return [layer for cut in self.ranges_of(rank) for layer in range(*cut)]

    def stages(
        self, rank: int, layers: Sequence[Any], dtype: str, seed: int, device: str = "cpu", frozen: Sequence[str] = ()
    ) -> list[nn.Stage]:
        """Make the stages of one rank of a pipeline from the layers of the whole model, with new parameters.

        An entry of `layers` is whatever `adapters.as_layer` takes; functions among them make the layers of this rank.
        """
        return [
            nn.Stage(
                [as_layer(layers[place], place, seed) for place in range(start, stop)],
                dtype,
                seed,
                device,
                first=start,
                frozen=frozen,
            )
            for start, stop in self.ranges_of(rank)
        ]
