"""Which layers of a model each rank has."""

from __future__ import annotations

from dataclasses import dataclass

from mpipipe.schedules import Schedule


@dataclass(frozen=True)
class LayerRanges:
    """The schedule, (start, stop) of the layers of each stage, and the samples of a replica."""

    schedule: Schedule
    layer_ranges: list[tuple[int, int]]
    rows: int

    @property
    def microbatch_rows(self) -> int:
        """Number of samples of the largest micro-batch."""
        return -(-self.rows // self.schedule.microbatches)

    def ranges_of(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the layers of each stage of one rank of a pipeline."""
        return [self.layer_ranges[stage] for stage in self.schedule.stages_of(rank)]

    def layers_of(self, rank: int) -> list[int]:
        """Return the places in the model of all layers of one rank of a pipeline."""
        layers: list[int] = []
        for start, stop in self.ranges_of(rank):
            layers += range(start, stop)
        return layers
