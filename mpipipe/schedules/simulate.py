"""Simulate a schedule: how long it takes, where it idles, and how many activations it holds."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import add

from mpipipe.errors import ArgumentError
from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD, RECOMPUTE, WEIGHT_GRAD, Action
from mpipipe.schedules.checks import at_least_one, floats, one_per_stage
from mpipipe.schedules.proof import check
from mpipipe.schedules.replay import hops, replay
from mpipipe.schedules.schedule import Schedule
from mpipipe.text import counted

Span = tuple[Action, float, float]  # action, start, end
SAME = 1e-9  # share of a time: times that differ by less may be one time, rounded


@dataclass(frozen=True)
class Costs:
    """Times for each chunk and micro-batch, in any one unit.

    Each is a number, or a sequence of one number for each stage.

    In a schedule with slices they are those of the mean slice.

    Parameters
    ----------
    forward, input_grad, weight_grad : float or sequence of float, optional
        Times of F, I and W. B takes the last two.
    transfer : float or sequence of float, optional
        Time of one message between stages l-1 and l, in either direction, where they lie on
        different ranks. In a sequence entry l is the hop between stages l-1 and l, and entry 0 is
        not used.
    recompute : float or sequence of float, optional
        Time of R, which runs a forward again; by default that of F.
    slices : sequence of float, optional
        How the times of the slices of a sequence relate, all above 0: attention takes longer in
        later ones. Only their ratios count, as (1, 2, 3); messages are alike. By default all slices
        take the same time.
    message_bytes : float or sequence of float, optional
        Bytes of a message between stages l-1 and l, as for `transfer`. Only `simulate_flows` counts
        them.
    gradient_bytes : float or sequence of float, optional
        Bytes of the gradients of a stage that replicas sum. Only `simulate_flows` counts them.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> costs = schedules.Costs(forward=[1, 1, 3], input_grad=1, weight_grad=1, transfer=0.5)
    >>> schedules.simulate(schedules.one_f_one_b(3, 2), costs).makespan
    18.0
    """

    forward: float | Sequence[float] = 1
    input_grad: float | Sequence[float] = 1
    weight_grad: float | Sequence[float] = 1
    transfer: float | Sequence[float] = 0
    recompute: float | Sequence[float] | None = None
    slices: Sequence[float] | None = field(default=None, kw_only=True)
    message_bytes: float | Sequence[float] = field(default=0, kw_only=True)
    gradient_bytes: float | Sequence[float] = field(default=0, kw_only=True)

    def per_stage(self, name: str, stages: int) -> list[float]:
        """Give a cost, by its name, as one float for each stage.

        ArgumentError is raised if it is negative, not finite, or not one per stage.
        """
        if name == "recompute" and self.recompute is None:
            name = "forward"
        return one_per_stage(f"the cost {name}", name, getattr(self, name), stages)

    def average(self, stages: int) -> Costs:
        """Give each cost as its mean over the stages, a number that fits any number of stages."""
        means = []
        for name in TIMES:
            means.append(math.fsum(self.per_stage(name, stages)) / stages)
        return Costs(*means, slices=self.slices)

    def per_slice(self, slices: int) -> list[float]:
        """Give for each slice the time that it takes of that of the mean slice.

        ArgumentError is raised unless there are `slices` numbers above 0.
        """
        return shares_of_mean(self.slices, slices, "times")

    def of_mean_slice(self) -> Costs:
        """Give the costs without differences between slices."""
        return replace(self, slices=None)


TIMES = ("forward", "input_grad", "weight_grad", "transfer", "recompute")


def shares_of_mean(given: Sequence[float] | None, slices: int, what: str) -> list[float]:
    """Return the share of each slice in the mean one's time; refuse numbers of 0 or below."""
    if given is None:
        return [1.0] * slices
    numbers = floats(given, slices)
    if numbers is None or 0 in numbers:
        raise ArgumentError(
            f"the {what} of slices do not fit the schedule",
            found=f"slices={given!r}",
            expected=f"{counted(slices, 'number')} above 0, one per slice of a sequence",
        )
    mean = math.fsum(numbers) / slices
    return [number / mean for number in numbers]


EQUAL_COSTS = Costs()  # a unit of time for each of F, I and W


def are_alike(costs: Costs, stages: int) -> bool:
    """Return True if all F's, I's and W's take the same time, and messages none."""
    times = []
    for name in ("forward", "input_grad", "weight_grad"):
        times += costs.per_stage(name, stages)
    return max(times) - min(times) <= SAME * max(times) and not any(
        costs.per_stage("transfer", stages)[1:]
    )


@dataclass(frozen=True)
class Timeline:
    """The result of `simulate`.

    Attributes
    ----------
    schedule : Schedule
        The schedule that ran.
    makespan : float
        Time from the first start to the last end, in the unit of the costs.
    bubble_fraction, bubble_ratio : float
        Idle time / (ranks * makespan), and idle time / busy time: the (P-1)/M of the literature.
    peak_activations : list of int
        For each rank the largest number of chunk activations alive at once, each of one unit, a
        slice where there are slices. An activation is alive from F until B (or W where the backward
        is split), both ends included; one that is recomputed from R on. A schedule of forwards only
        keeps none. `peak_memory` counts the inputs too that are kept for an R.
    durations : dict of str to list of float
        For each op its time in each stage, that of the mean slice.
    starts : list of array
        For each rank the start times of its actions.
    ends : list of float
        For each rank the end of its last action.
    done : (array, array)
        At stage * units + unit the end of its F, and of its B or I.
    shares : list of float
        For each slice of a sequence its time in that of the mean slice.
    """

    schedule: Schedule
    makespan: float
    bubble_fraction: float
    bubble_ratio: float
    peak_activations: list[int]
    durations: dict[str, list[float]] = field(repr=False)
    starts: list[array[float]] = field(repr=False)
    ends: list[float] = field(repr=False)
    done: tuple[array[float], array[float]] = field(repr=False)
    shares: list[float] = field(repr=False)

    def _repr_svg_(self) -> str | None:
        """Draw the timeline in a notebook."""
        from mpipipe.schedules.draw import picture

        return picture(self)

    @property
    def peak_sequences(self) -> list[float]:
        """For each rank `peak_activations` in whole sequences: divided by the slices of one."""
        return [peak / self.schedule.slices for peak in self.peak_activations]

    @property
    def efficiency(self) -> float:
        """Share of all ranks' time in which they compute, 1 - bubble_fraction."""
        return 1 - self.bubble_fraction

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank a tuple of (action, start, end)."""
        spans = []
        for order, starts in zip(self.schedule.orders, self.starts):
            of_rank = []
            for action, start in zip(order, starts):
                of_rank.append((action, start, start + self.duration(action)))
            spans.append(tuple(of_rank))
        return tuple(spans)

    def duration(self, action: Action) -> float:
        """Return how long an action takes."""
        return (
            self.durations[action.op][action.stage]
            * self.shares[action.microbatch % len(self.shares)]
        )


def simulate(schedule: Schedule, costs: Costs = EQUAL_COSTS) -> Timeline:
    """Run a schedule on paper: an action starts when its rank is free and its input is there.

    It is checked first: ScheduleError is raised where it cannot run, ArgumentError where a cost is
    negative, not finite, or not one per stage. By default each F, I and W takes one unit of time.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> timeline = schedules.simulate(schedules.one_f_one_b(ranks=4, microbatches=8))
    >>> timeline.makespan, timeline.bubble_ratio, timeline.peak_activations
    (33.0, 0.375, [4, 3, 2, 1])
    """
    check(schedule)
    stages = schedule.stages
    transfer = costs.per_stage("transfer", stages)
    durations = {
        FORWARD: costs.per_stage("forward", stages),
        INPUT_GRAD: costs.per_stage("input_grad", stages),
        WEIGHT_GRAD: costs.per_stage("weight_grad", stages),
        RECOMPUTE: costs.per_stage("recompute", stages),
    }
    durations[BACKWARD] = [*map(add, durations[INPUT_GRAD], durations[WEIGHT_GRAD])]
    shares = costs.per_slice(schedule.slices)
    peaks = []
    for order in schedule.orders:
        changes: list[int] = []
        for begins, ends_here in activations(schedule, order):
            changes += begins, -ends_here
        peaks.append(max(accumulate(changes, initial=0)))
    starts, ends, done = replay(schedule, durations, transfer, shares)
    makespan = max(ends)
    # A checked schedule is complete: every stage runs every unit forward and, if there are
    # backwards, back.
    backwards = durations[BACKWARD][first_trained(schedule) :]
    busy = schedule.units * math.fsum((*durations[FORWARD], *backwards))
    again = []
    for stage, unit in schedule.recomputed:
        again.append(durations[RECOMPUTE][stage] * shares[unit % len(shares)])
    busy += math.fsum(again)
    whole = schedule.ranks * makespan
    idle = max(0.0, whole - busy)
    fraction = 0.0
    ratio = 0.0
    if makespan:
        fraction = idle / whole
        ratio = idle / busy if busy else math.inf
    return Timeline(
        schedule, makespan, fraction, ratio, peaks, durations, starts, ends, done, shares
    )


# -- How much a rank holds for its backwards, action by action; independent of costs ---------------


def first_trained(schedule: Schedule) -> int:
    """Return the first stage with backwards, the number of stages where none has."""
    if schedule.forwards_only:
        return schedule.stages
    return schedule.trained_from


def activations(schedule: Schedule, order: Sequence[Action]) -> Iterator[tuple[bool, bool]]:
    """Yield whether an activation begins with each action, and whether one ends with it."""
    trained_from = first_trained(schedule)
    recomputed = {(stage, unit) for stage, op, unit in order if op == RECOMPUTE}
    for stage, op, unit in order:
        whole = op == FORWARD and stage >= trained_from and (stage, unit) not in recomputed
        yield whole or op == RECOMPUTE, op in (BACKWARD, WEIGHT_GRAD)


#     F        whole activation          without an R it stays until B or W
#     F R B    whole | input | whole     an F drops all but the input if an R follows
def peak_memory(
    schedule: Schedule,
    activation: float | Sequence[float] = 1.0,
    kept_input: float | Sequence[float] = 0.0,
    slices: Sequence[float] | None = None,
) -> list[float]:
    """Sum up for each rank what its order holds at once for backwards, at most.

    Where an R follows, F leaves the input of the stage alone, and R brings the activation back.
    While such an F runs, its whole activation is there.

    Parameters
    ----------
    schedule : Schedule
        One that `check` accepts.
    activation : float or sequence of float, optional
        What a forward leaves for its backward, its input included: bytes, or any other unit; one
        number, or one per stage.
    kept_input : float or sequence of float, optional
        What is left of that where the forward is run again: the input of the stage.
    slices : sequence of float, optional
        How the lengths of the slices of a sequence relate; sizes are those of the mean slice. By
        default all are alike.

    Returns
    -------
    list of float
        The peak of each rank, in that unit. By default activations: those that
        `Timeline.peak_activations` counts, and the one of each F in passing. A schedule of forwards
        only holds nothing.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.one_f_one_b(4, 8)
    >>> schedules.peak_memory(schedule, activation=10, kept_input=1)
    [40.0, 30.0, 20.0, 10.0]
    >>> schedules.peak_memory(schedules.with_recompute(schedule), activation=10, kept_input=1)
    [13.0, 12.0, 11.0, 10.0]
    """
    whole, inputs = sizes_per_stage(schedule, activation, kept_input)
    shares = shares_of_mean(slices, schedule.slices, "lengths")
    return [max(held(schedule, order, whole, inputs, shares)) for order in schedule.orders]


def sizes_per_stage(
    schedule: Schedule, activation: float | Sequence[float], kept_input: float | Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return (size of an activation, size of its input) of each stage."""
    whole = one_per_stage("the size of an activation", "activation", activation, schedule.stages)
    inputs = one_per_stage("the size of an input", "kept_input", kept_input, schedule.stages)
    for stage, (size, part) in enumerate(zip(whole, inputs)):
        if part > size:
            raise ArgumentError(
                "the input of a stage is part of its activation",
                stage=stage,
                found=f"kept_input={part:g}, activation={size:g}",
                expected="an input that is not larger than its activation",
            )
    return whole, inputs


def held(
    schedule: Schedule,
    order: Sequence[Action],
    whole: Sequence[float],
    kept: Sequence[float],
    shares: Sequence[float] = (1.0,),
) -> Iterator[float]:
    """Yield what a rank with this order holds during each action; frozen stages hold nothing."""
    first = first_trained(schedule)
    now = 0.0
    for stage, op, unit in order:
        share = shares[unit % len(shares)]
        size = whole[stage] * share
        part = kept[stage] * share
        if op == FORWARD and stage >= first:
            yield now + size
            if (stage, unit) in schedule.recomputed:
                size = part
            now += size
            continue
        if op == RECOMPUTE:
            now += size - part
        yield now
        if op in (BACKWARD, WEIGHT_GRAD):
            now -= size


# -- How long messages take, by latency, bandwidth and size of a node ------------------------------


FORM = "latency,bandwidth[,node-size[,latency inside,bandwidth inside]]"


#     rank    0   1   2   3 | 4   5   6   7     node size 4: only hop 4 leaves a node
@dataclass(frozen=True)
class Links:
    """The links between ranks: a message of n bytes takes latency + n / bandwidth.

    Parameters
    ----------
    latency, bandwidth : float
        Seconds that a message without content takes between nodes, and bytes per second; inf if
        length does not matter.
    node_size : int, optional
        Ranks on a node: r and s share one if r // node_size == s // node_size. By default each has
        its own.
    inside_latency, inside_bandwidth : float, optional
        The same within a node; by default a message takes no time there.
    nic_ranks : int, optional
        Ranks that share a network card (NIC), at most those of a node: r and s share one if
        r // nic_ranks == s // nic_ranks. `bandwidth` is that of a NIC in one direction. Only
        `simulate_flows` lets messages wait for each other. By default each rank has one, on which
        no message waits.

    Examples
    --------
    >>> from mpipipe.schedules import Links
    >>> links = Links(latency=0.5, bandwidth=1000, node_size=2)
    >>> links.times(placement=(0, 1, 2, 3), message_bytes=500)
    [0.0, 0.0, 1.0, 0.0]
    """

    latency: float
    bandwidth: float
    node_size: int = 1
    inside_latency: float = 0.0
    inside_bandwidth: float = math.inf
    nic_ranks: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        at_least_one("node_size", self.node_size)
        at_least_one("nic_ranks", self.nic_ranks)
        if self.node_size % self.nic_ranks:
            raise ArgumentError(
                "a node does not hold the ranks of whole NICs",
                found=f"nic_ranks={self.nic_ranks}, node_size={self.node_size}",
                expected="a divisor of node_size",
            )
        for entry in fields(self):
            value = getattr(self, entry.name)
            is_number = isinstance(value, (int, float))
            expected = "seconds, at least 0"
            fits = is_number and 0 <= value < math.inf
            if entry.name.endswith("bandwidth"):
                expected = "bytes per second, above 0"
                fits = is_number and value > 0
            if not fits:
                raise ArgumentError(
                    f"{entry.name} does not describe a link",
                    found=f"{entry.name}={value!r}",
                    expected=expected,
                )

    @classmethod
    def read(cls, text: str) -> Links:
        """Read links from text such as "5e-6,25e9,8".

        The form is latency,bandwidth[,node-size[,latency inside,bandwidth inside]].

        ArgumentError is raised if it has another form or describes no link.
        """
        parts = text.split(",")
        try:
            if len(parts) not in (2, 3, 5):
                raise ValueError(text)
            latency, bandwidth, *inside = map(float, parts[:2] + parts[3:])
            node_size = 1
            if parts[2:]:
                node_size = int(parts[2])
            return cls(latency, bandwidth, node_size, *inside)
        except ArgumentError:
            raise
        except ValueError as error:
            raise ArgumentError(
                "no model of links", found=repr(text), expected=f"{FORM}, as in 5e-6,25e9,8"
            ) from error

    def inside(self, rank: int, other: int) -> bool:
        """Return True if two ranks are on one node.

        Parameters
        ----------
        rank, other : int
        """
        return rank // self.node_size == other // self.node_size

    def times(self, placement: Sequence[int], message_bytes: float) -> list[float]:
        """Return the seconds of a message over each hop, as `Costs.transfer` takes them.

        Parameters
        ----------
        placement : sequence of int
            Rank of each logical stage.
        message_bytes : float
            Bytes of the activation of one micro-batch between two stages, or of its gradient; at
            least 0 and finite.

        Returns
        -------
        list of float
            Entry l is the time between stages l-1 and l. Entry 0 is 0, and so is a hop between
            stages of one rank.
        """
        outside = self.latency + message_bytes / self.bandwidth
        inside = self.inside_latency + message_bytes / self.inside_bandwidth
        transfer = [0.0]
        for rank, next_rank in pairwise(placement):
            if self.inside(rank, next_rank):
                transfer.append(inside)
            else:
                transfer.append(outside)
        return hops(placement, transfer)
