"""How long a step of a plan takes, and how much memory each rank needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from operator import add

from mpipipe import schedules
from mpipipe.planning.profile import LayerCosts, Profile, Sizes, joined
from mpipipe.schedules import INPUT_GRAD, Costs, Schedule, before_backwards


@dataclass(frozen=True)
class Plan:
    """A choice, and what is predicted for it.

    Parameters
    ----------
    choice : Choice
        What is decided.
    seconds : float
        Of a step of the training.
    bubble : float
        Idle part of the ranks' time between the first action of the step and the last.
    memory : tuple of int
        Peak of the resident bytes of each rank.
    schedule : Schedule
        What runs.
    costs : Costs
        Of its stages.
    order : str, optional
        Axes of the mesh, as `Mesh` takes them, where ranks share network cards.
    """

    choice: Choice
    seconds: float
    bubble: float
    memory: tuple[int, ...]
    schedule: Schedule
    costs: Costs
    order: str | None = None

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs the most."""
        return max(self.memory)


def predict(
    profile: Profile, choice: Choice, rows: int, trained: Collection[int] | None = None
) -> Plan:
    """Predict the time and memory of a step.

    Raises ArgumentError where the plan does not fit the ranks, or no recomputation keeps its limit.
    A step lasts as long as the simulated schedule, times `Profile.scale`: sums over replicas,
    clipping and optimizer are in that factor alone. An action lasts as long as its layers, then
    `RankCosts.action`, and the time for which its messages keep the rank from computing. W and R
    have no messages. The slices of a sequence share what was measured of it as a whole. Not
    counted: messages that wait for others on a network card (`schedules.simulate_flows` counts
    them), and skips.

    Parameters
    ----------
    profile : Profile
        What was measured, also for micro-batches of this size.
    choice : Choice
        The plan.
    rows : int
        Sequences of a step in each replica.
    trained : collection of int, optional
        Layers with something to train; by default all.

    Examples
    --------
    >>> from mpipipe.planning import Choice, LayerCosts, Link, Profile, RankCosts, Sizes, predict
    >>> rank = RankCosts((LayerCosts(1.0, 2.0, 1.0, 1.0, 1.0),))
    >>> sizes = {1: [Sizes(saved=100)] * 2}
    >>> profile = Profile((0, 0), {1: (rank, rank)}, {1: Link()}, sizes, (8, 8))
    >>> found = predict(profile, Choice("one_f_one_b", 1, 4, (1, 1)), rows=4)
    >>> found.seconds, found.bubble, found.memory
    (15.0, 0.2, (208, 108))
    """
    schedule = choice.build(profile.ranks, trained)
    plan = LayerRanges(schedule, choice.ranges, rows)
    layers = profile.sizes[plan.microbatch_rows]
    stages = [joined(layers[start:stop]) for start, stop in plan.layer_ranges]
    costs = replace(
        _costs(profile, plan), message_bytes=[stage.input / schedule.slices for stage in stages]
    )
    timeline = schedules.simulate(schedule, costs)
    peaks = step_peaks(schedule, stages)
    memory = []
    for rank, peak in enumerate(peaks):
        state = sum(profile.states[layer] for layer in plan.layers_of(rank))
        memory.append(profile.process + state + round(sum(peak)))
    return Plan(
        choice,
        seconds=profile.scale * timeline.makespan,
        bubble=timeline.bubble_fraction,
        memory=tuple(memory),
        schedule=schedule,
        costs=costs,
    )


def _costs(profile: Profile, plan: LayerRanges) -> Costs:
    """Return the costs of stages, for a unit of the mean size."""
    schedule = plan.schedule
    size = plan.microbatch_rows
    share = plan.rows / (size * schedule.units)
    splits = _splits(schedule)
    link = profile.links[size]
    # An edge on one rank costs nothing.
    away = crossings(schedule)
    times = []
    for stage, rank in enumerate(schedule.placement):
        measured = profile.costs[size][rank]
        action = measured.action
        kinds = profile.kinds[slice(*plan.layer_ranges[stage])]
        whole = LayerCosts(*map(sum, zip(*[measured.layers[kind] for kind in kinds])))
        forward = whole.forward
        if stage == schedule.stages - 1:
            forward += measured.loss
        input_grad = whole.backward
        weight_grad = 0.0
        if stage in splits:
            input_grad = whole.input_grad
            weight_grad = share * whole.weight_grad + action
        messages = (away[stage] + away[stage + 1]) * link.message / schedule.slices
        times.append(
            (
                share * forward + action + messages,
                share * input_grad + action + messages,
                weight_grad,
                away[stage] * link.transfer / schedule.slices,
                share * whole.again + action,
            )
        )
    return Costs(*map(list, zip(*times)))


def _splits(schedule: Schedule) -> set[int]:
    """Return the stages whose backward is split."""
    actions = chain(*schedule.orders)
    return {action.stage for action in actions if action.op == INPUT_GRAD}


# -- The memory of a rank in a training step -------------------------------------------------------
#
# F  leaves `saved` until B, or until I, which leaves `pending` until W
# R  leaves it where F has kept its input alone


def step_peaks(
    schedule: Schedule, stages: Sequence[Sizes], shares: Sequence[float] = ()
) -> list[tuple[float, float]]:
    """Return for each rank bytes of activations at their peak, and of tables and an action on top.

    `shares` are those of the slices in a sequence, by default all alike. Buffers of messages from
    other ranks are not counted.
    """
    shares = shares or [1 / schedule.slices] * schedule.slices
    splits = _splits(schedule)
    away = crossings(schedule)
    tables = [0.0] * schedule.ranks
    scratch = [0.0] * schedule.ranks
    activations = []
    inputs = []
    for stage, sizes in enumerate(stages):
        rank = schedule.placement[stage]
        # While an action runs, what the one before it has sent is still on the way.
        leaving = sizes.output * away[stage + 1]
        kept = 0.0
        most = sizes.forward
        if schedule.has_backward(stage):
            leaving = max(leaving, sizes.input * away[stage])
            kept = sizes.saved
            if stage in splits:
                kept = max(kept, sizes.pending)
                most = max(most, sizes.saved + sizes.input_grad, sizes.pending + sizes.weight_grad)
            else:
                most = max(most, kept + sizes.backward)
        own_input = 0.0
        if stage and not away[stage]:
            own_input = sizes.input
        inputs.append(own_input / schedule.slices)
        activations.append((kept + own_input) / schedule.slices)
        tables[rank] += sizes.tables
        scratch[rank] = max(scratch[rank], max(shares) * (most - kept + leaving))
    peaks = schedules.peak_memory(schedule, activations, inputs, shares)
    return [*zip(peaks, map(add, tables, scratch))]


def crossings(schedule: Schedule) -> list[bool]:
    """Return whether the edge into each stage, and the one after the last, joins two ranks."""
    inner = [rank != other for rank, other in pairwise(schedule.placement)]
    return [False, *inner, False]


# -- What a plan decides, and the schedule that follows from it ------------------------------------


@dataclass(frozen=True)
class Choice:
    """What a plan decides.

    Parameters
    ----------
    schedule : str
        A name that `schedules.by_name` knows.
    chunks, microbatches : int
        Stages on each rank, and micro-batches of a step in each replica.
    partition : tuple of int
        Number of layers of each stage.
    recompute : bool
        Whether every forward is run again before its backward.
    recompute_limit : int, optional
        Activations of stages that a rank may hold; as many forwards as that needs are run again.
    slices : int
        Parts of each sequence that go through the pipeline one after the other. A search leaves
        them as they are.

    Examples
    --------
    >>> from mpipipe.planning import Choice
    >>> choice = Choice("one_f_one_b", 1, 4, (3, 2))
    >>> choice.ranges
    [(0, 3), (3, 5)]
    >>> choice.build(ranks=2).stages
    2
    """

    schedule: str
    chunks: int
    microbatches: int
    partition: tuple[int, ...]
    recompute: bool = False
    recompute_limit: int | None = None
    slices: int = 1

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) of the layers of each stage."""
        return list(pairwise(accumulate(self.partition, initial=0)))

    def build(self, ranks: int, trained: Collection[int] | None = None) -> Schedule:
        """Build the schedule that a training with this plan runs, with its recomputations.

        Raises ArgumentError where the numbers do not fit, or no recomputation keeps the limit.

        Parameters
        ----------
        ranks : int
            Of the pipeline.
        trained : collection of int, optional
            Layers with something to train; by default all.
        """
        schedule = schedules.by_name(
            self.schedule,
            ranks=ranks,
            chunks=self.chunks,
            microbatches=self.microbatches,
            slices=self.slices,
        )
        schedule = completed(schedule, self.ranges, trained, self.recompute_limit)
        if self.recompute:
            return before_backwards(schedule)
        return schedule

    @property
    def recomputation(self) -> str:
        """Which forwards are run again, in a word."""
        if self.recompute:
            return "all"
        if self.recompute_limit is None:
            return "-"
        return f"to hold {self.recompute_limit}"


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
        return [place for ends in self.ranges_of(rank) for place in range(*ends)]


def completed(
    schedule: Schedule,
    ranges: Sequence[tuple[int, int]],
    trained: Collection[int] | None,
    recompute_limit: int | None,
) -> Schedule:
    """Take out backwards of frozen stages, and put in forwards that are run again."""
    if trained is not None:
        frozen = set()
        for stage, cut in enumerate(ranges):
            if not set(range(*cut)) & set(trained):
                frozen.add(stage)
        schedule = schedules.with_frozen(schedule, frozen)
    if recompute_limit is not None:
        schedule = schedules.with_recompute(schedule, memory_limit=recompute_limit)
    return schedule
