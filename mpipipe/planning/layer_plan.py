"""The cut of a model into stages: a schedule, and the layers of each of its stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mpipipe import nn
from mpipipe.adapters import as_layer, check_distinct, names_of_entry, tie_shared
from mpipipe.errors import ArgumentError
from mpipipe.planning.layer_ranges import LayerRanges
from mpipipe.schedules import with_skips


class LayerPlan(LayerRanges):
    """The cut of a model whose layers are there."""

    def with_names(self, layers: Sequence[Any]) -> LayerPlan:
        """Return the plan with a skip for each name that goes from one stage to another.

        Raises ArgumentError where a name is given twice, after a layer has taken it, or for no
        layer.
        """
        ends = name_ends(layers)
        if not ends:
            return self
        starts = [start for start, _ in self.layer_ranges]
        skips = {}
        for name, (giver, takers) in ends.items():
            source = 0 if giver is None else bisect_right(starts, giver) - 1
            targets = sorted({bisect_right(starts, place) - 1 for place in takers} - {source})
            if targets:
                skips[name] = [(source, target) for target in targets]
        return replace(self, schedule=with_skips(self.schedule, skips))

    def stages(
        self,
        rank: int,
        layers: Sequence[Any],
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
            own = [as_layer(layers[place], place, seed) for place in range(start, stop)]
            stages.append(nn.Stage(own, dtype, seed, device, first=start, frozen=frozen))
        return stages


def name_ends(layers: Sequence[Any]) -> dict[str, tuple[int | None, list[int]]]:
    """Return for each name the place of the layer that gives it, and of those that take it.

    A name of the inputs has None in place of the first.

    Raises ArgumentError where a name is given twice, after a layer has taken it, or for no layer,
    and for a layer that stands in two places.
    """
    check_distinct(layers)
    tie_shared(layers)
    nn.check_slices(layers)
    ends = nn.ends_of_names(
        (place, *each) for place, entry in enumerate(layers) for each in names_of_entry(entry)
    )
    for name, (giver, takers) in ends.items():
        if not takers:
            raise ArgumentError(
                f"layers[{giver}] gives the name {name!r}, and no layer after it takes it",
                expected="a layer that takes it, such as nn.Join",
                remedy="an entry of PyTorch or JAX says what it takes by "
                "adapters.with_skips(entry, takes=(...))",
            )
    return ends
