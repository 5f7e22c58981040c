"""The cut of a model into stages: a schedule, and the layers of each of its stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpipipe import nn, schedules
from mpipipe.adapters import as_layer, check_entries
from mpipipe.errors import ArgumentError
from mpipipe.planning.predict import LayerRanges
from mpipipe.schedules import Schedule, with_skips
from mpipipe.text import counted, text_table


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


# -- This rank's stages, from one list of the layers of the whole model ----------------------------


@dataclass(frozen=True)
class CutStage:
    """What a stage of a cut is.

    Attributes
    ----------
    index : int
        Its number in the pipeline.
    layers : range
        Places of its layers in the list of the whole model.
    is_first, is_last : bool
        Whether inputs enter here, to the embedding of a text model, and whether the loss is here,
        after its head.
    parameters, bytes : int
        Number of its parameters, and bytes of them with their gradients, and of copies in a half
        dtype.
    """

    index: int
    layers: range
    is_first: bool
    is_last: bool
    parameters: int
    bytes: int


class Cut(list[nn.Stage]):
    """The stages of one rank, for `Pipeline`: a list that knows how the whole model is cut.

    Parameters
    ----------
    plan, rank, stages : LayerPlan, int, sequence of Stage
        What `mpipipe.cut` puts in.

    Attributes
    ----------
    stages : tuple of CutStage
        What each of them is.
    is_first, is_last : bool
        Whether this rank has the stage where inputs enter, and the one where the loss is.
    schedule : Schedule
        That of `cut`, with a skip for each name that layers of one stage give and those of a later
        one take. Give this one to `Pipeline`.
    layer_ranges, placement : tuple of (int, int), tuple of int
        Start and stop of the layers of every stage of the pipeline, and its rank. A pipeline
        refuses stages whose cut is not that of the other ranks, or that were cut for another
        placement.
    """

    def __init__(self, plan: LayerPlan, rank: int, stages: Sequence[nn.Stage]) -> None:
        super().__init__(stages)
        self.layer_ranges = tuple(plan.layer_ranges)
        self.placement = plan.schedule.placement
        self.schedule = plan.schedule
        last = len(plan.layer_ranges) - 1
        indices = plan.schedule.stages_of(rank)
        entries = []
        for index, stage in zip(indices, stages):
            entry = CutStage(
                index=index,
                layers=range(*plan.layer_ranges[index]),
                is_first=index == 0,
                is_last=index == last,
                parameters=sum(array.size for array in stage.parameters.values()),
                bytes=stage.buffers.nbytes,
            )
            entries.append(entry)
        self.stages = tuple(entries)
        self.is_first = 0 in indices
        self.is_last = last in indices

    def __str__(self) -> str:
        cells = []
        for stage in self.stages:
            layers = f"{stage.layers.start}-{stage.layers.stop - 1}"
            cells.append([f"{stage.index}", layers, f"{stage.parameters:,}", f"{stage.bytes:,}"])
        return "\n".join(text_table(["stage", "layers", "parameters", "bytes"], cells, left=(1,)))


def cut(
    layers: Sequence[object],
    schedule: Schedule,
    rank: int,
    costs: Sequence[float] | None = None,
    *,
    dtype: str = "float32",
    seed: int = 0,
    device: str = "cpu",
    frozen: Sequence[str] = (),
) -> Cut:
    """Cut a model into the stages of a schedule, and make those of one rank, in rising order.

    Raises ArgumentError for fewer layers than stages, costs that do not fit, no such rank, or
    something that is no layer; and where a name is given twice, after it is taken, or for no layer.

    Parameters
    ----------
    layers : sequence
        The layers of the whole model, in order, the same on every rank: layers of `nn`, modules of
        PyTorch, pairs (function of JAX, its parameters), or functions without arguments that make
        one of these. Functions make the layers of this rank alone. A layer of `nn` that takes or
        gives names stands in the list itself; others of that kind within `adapters.with_skips`.
    schedule : Schedule
        That of the pipeline: it says how many stages there are, and on which ranks.
    rank : int
        The rank in the communicator of the pipeline.
    costs : sequence of float, optional
        One number for each layer, in any unit and the same on every rank, such as seconds; the most
        expensive stage is made as cheap as it can be. By default all layers are alike.
    dtype, seed, device, frozen : str, int, str, sequence of str
        As for `nn.Stage`. Names and initial values of parameters are the same however the model is
        cut.

    Examples
    --------
    >>> from mpipipe import cut, nn, schedules
    >>> schedule = schedules.one_f_one_b(ranks=2, microbatches=4)
    >>> square = lambda: nn.Linear(8, 8)
    >>> layers = [square, nn.Gelu, square, nn.Gelu, lambda: nn.Linear(8, 2)]
    >>> stages = cut(layers, schedule, rank=1, costs=[8, 1, 8, 1, 2])
    >>> stages.is_last, stages.stages[0].layers, sorted(stages[0].parameters)
    (True, range(2, 5), ['2.bias', '2.weight', '4.bias', '4.weight'])
    """
    if rank not in range(schedule.ranks):
        raise ArgumentError(
            "no such rank in the schedule", found=rank, expected=f"0 to {schedule.ranks - 1}"
        )
    layers = list(layers)
    if costs is None:
        costs = [1.0] * len(layers)
    costs = list(costs)
    if len(costs) != len(layers):
        raise ArgumentError(
            "costs must say what each layer costs",
            found=f"{counted(len(costs), 'cost')} for {counted(len(layers), 'layer')}",
            expected="one for each",
        )
    ranges = schedules.partition(costs, schedule.stages)
    plan = LayerPlan(schedule, ranges, rows=0).with_names(layers)
    return Cut(plan, rank, plan.stages(rank, layers, dtype, seed, device, frozen))
