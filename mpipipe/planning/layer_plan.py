"""The cut of a model into stages: a schedule, and the layers of each of its stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from mpipipe import nn
from mpipipe.adapters import as_layer, check_entries
from mpipipe.errors import ArgumentError
from mpipipe.planning.layer_ranges import LayerRanges
from mpipipe.schedules import with_skips


class LayerPlan(LayerRanges):
    """The cut of a model whose layers are there."""

    def with_names(self, layers: Sequence[object]) -> LayerPlan:
        """Return the plan with a skip for each name that goes from one stage to another.

        Raises ArgumentError where a name is given twice, after a layer has taken it, or for no
        layer.
        """
        ends = name_ends(layers)
        if not ends:
            return self
        starts = [start for start, _ in self.layer_ranges]
        skips: dict[str, list[tuple[int, int]]] = {}
        for name, (giver, takers) in ends.items():
            # Inputs come to the stage of the first layer.
            source = bisect_right(starts, giver or 0) - 1
            targets = set()
            for taker in takers:
                targets.add(bisect_right(starts, taker) - 1)
            for target in sorted(targets - {source}):
                skips.setdefault(name, []).append((source, target))
        return replace(self, schedule=with_skips(self.schedule, skips))

    def stages(
        self,
        rank: int,
        layers: Sequence[object],
        dtype: str,
        seed: int,
        device: str = "cpu",
        frozen: Sequence[str] = (),
    ) -> list[nn.Stage]:
        """Make the stages of one rank from the layers of the whole model.

        An entry of `layers` is whatever `adapters.as_layer` takes; functions among them make the
        layers of this rank.
        """
        stages = []
        for start, stop in self.ranges_of(rank):
            stage_layers = []
            for place in range(start, stop):
                stage_layers.append(as_layer(layers[place], place, seed))
            stages.append(nn.Stage(stage_layers, dtype, seed, device, first=start, frozen=frozen))
        return stages


def name_ends(layers: Sequence[object]) -> dict[str, tuple[int | None, list[int]]]:
    """Return for each name the place of the layer that gives it, and of those that take it.

    A name of the inputs has None in place of the first.

    Raises ArgumentError where a name is given twice, after a layer has taken it, or for no layer,
    and for a layer that stands in two places.
    """
    names = [*check_entries(layers)]
    nn.check_slices(layers)
    ends = nn.ends_of_names(names)
    for name, (giver, takers) in ends.items():
        if not takers:
            raise ArgumentError(
                f"layers[{giver}] gives the name {name!r}, and no layer after it takes it",
                expected="a layer that takes it, such as nn.Join",
                remedy="an entry of PyTorch or JAX says what it takes by "
                "adapters.with_skips(entry, takes=(...))",
            )
    return ends
