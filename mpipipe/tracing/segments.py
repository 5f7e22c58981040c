"""What each moment of a recorded step went into: pieces of time that do not overlap.

Several things may be true of one moment. The first of these takes it:

    compute      an action runs; a ring of attention waits within actions
    reading      the rank waits for its batch, before the step
    late         the rank waits for others who are not there yet
    transfer     it waits for a message that was sent
    sums         it starts sums over replicas, or waits for them once all replicas have come
    optimizer    the optimizer runs
    overhead     all else: agreement, bookkeeping, copies

A wait for a message is late until its sender sent it. A wait for all ranks of a group is late until
the last of them had come. A wait for one rank to take or to send something else is late as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from mpipipe.schedules import Action, Costs, Schedule, simulate
from mpipipe.tracing.records import RankRecord, StepRecord, Waited, deliveries

LATE = "late"
ORDER = ("compute", "reading", LATE, "transfer", "sums", "optimizer", "overhead")
# What spans of a recorder went into, and their names, by the recorder's first words for them.
SPANS = {
    "all-reduce": ("sums", "start of sums"),
    "optimizer": ("optimizer", "optimizer"),
    "read": ("reading", "reading"),
}


class Segment(NamedTuple):
    """A piece of a step: what it went into, its name, and the action that ran."""

    start: float
    end: float
    part: str
    name: str
    action: Action | None = None


class Peers(NamedTuple):
    """What a rank has to know of the others to divide its waits."""

    # (replica, step, message) -> when it was sent
    sent: dict[tuple, float]
    # (step, group, reason, number of earlier ones) -> when the last rank of the group had come
    entries: dict[tuple, float]


def segments(records: Sequence[RankRecord]) -> list[list[list[Segment]]]:
    """Divide all steps, on one clock: for each rank and step its pieces in order."""
    peers = _peers(records)
    pieces = []
    for record in records:
        of_rank = []
        for number, step in enumerate(record.steps):
            of_rank.append(_divided(step, number, record.replica, peers))
        pieces.append(of_rank)
    return pieces


def _peers(records: Sequence[RankRecord]) -> Peers:
    sent: dict[tuple, float] = {}
    entries: dict[tuple, float] = {}
    for record in records:
        for number, step in enumerate(record.steps):
            for message in step.sent:
                sent[record.replica, number, message.message] = message.time
            for key, wait in _of_groups(step, number):
                entries[key] = max(entries.get(key, wait.start), wait.start)
    return Peers(sent, entries)


def _of_groups(step: StepRecord, number: int) -> Iterable[tuple[tuple, Waited]]:
    """Waits for all ranks of a group, each with a key that is the same on all of them."""
    counts: dict[tuple, int] = defaultdict(int)
    for wait in step.waits:
        if wait.group is not None:
            name = wait.group, wait.what
            yield (number, *name, counts[name]), wait
            counts[name] += 1


def _divided(step: StepRecord, number: int, replica: int, peers: Peers) -> list[Segment]:
    keys = {wait: key for key, wait in _of_groups(step, number)}
    found = []
    for action, start, end in step.actions:
        found.append(Segment(start, end, "compute", str(action), action))
    for span in step.spans:
        part, name = SPANS[span.name.partition(" ")[0]]
        found.append(Segment(span.start, span.end, part, name))
    for wait in step.waits:
        arrived = wait.end  # when the others had come
        if wait.message is not None:
            arrived = peers.sent.get((replica, number, wait.message), arrived)
        elif wait.group is not None:
            arrived = peers.entries[keys[wait]]
        arrived = min(max(arrived, wait.start), wait.end)
        found.append(Segment(wait.start, arrived, LATE, wait.what))
        if wait.message is not None:
            found.append(Segment(arrived, wait.end, "transfer", wait.what))
        elif wait.sums:
            found.append(Segment(arrived, wait.end, "sums", wait.what))
    return _painted(found, step.start, step.end)


def _painted(found: Iterable[Segment], begin: float, stop: float) -> list[Segment]:
    """Give each moment to the piece whose part comes first, else to overhead."""
    overhead = Segment(begin, stop, "overhead", "overhead")
    pieces = sorted([*found, overhead], key=lambda piece: (piece.start, piece.end))
    times = set()
    for piece in pieces:
        times.add(min(max(piece.start, begin), stop))
        times.add(min(max(piece.end, begin), stop))
    moments = sorted(times)
    visible: list[Segment] = []
    under_way: list[tuple[int, int]] = []
    begun = 0
    before = -1
    for start, end in pairwise(moments):
        while begun < len(pieces) and pieces[begun].start <= start:
            heappush(under_way, (ORDER.index(pieces[begun].part), begun))
            begun += 1
        while pieces[under_way[0][1]].end <= start:
            heappop(under_way)
        number = under_way[0][1]
        if number == before:
            start = visible.pop().start
        visible.append(pieces[number]._replace(start=start, end=end))
        before = number
    return visible


# -- Where the time of each step went, in nine parts that add up to it -----------------------------
#
# They are the parts above, but for "late". Each second of that belongs to one of these:
#
# bubble       as long as the rank would idle if all stages were like the mean stage, and messages
#              took no time; but no longer than it would idle with the mean costs of each stage
# imbalance    as much longer as it would idle with the mean costs of each stage
# transfer     what waits for messages hold up elsewhere
# late sender  the rest: a rank that came late, actions that did not last as long as others of
#              their kind, overhead of the sender
#
# How long a rank would idle is simulated with the recorded durations. Bubble, imbalance, and what
# messages hold up take their seconds in this order, each no more than is left of the waits of the
# step. So nothing counts twice, no part is negative, and a rank that is slower than the mean stage
# has no imbalance: the others wait for it.


PARTS = (
    "compute",
    "bubble",
    "imbalance",
    "late sender",
    "transfer",
    "sums",
    "optimizer",
    "overhead",
    "reading",
)


def parts_of_steps(
    records: Sequence[RankRecord],
    pieces: Sequence[Sequence[Sequence[Segment]]],
    schedule: Schedule,
    costs: Costs,
) -> list[list[dict[str, float]]]:
    """Return the seconds of each part, for each rank and step; `costs` are recorded ones."""
    idle = idle_times(schedule, costs)
    parts = []
    for record, steps in zip(records, pieces):
        parts.append([_parts(step, *idle[record.position]) for step in steps])
    return parts


def _parts(
    step: Sequence[Segment], mean: float, stages: float, messages: float
) -> dict[str, float]:
    parts = dict.fromkeys((*PARTS, LATE), 0.0)
    for piece in step:
        parts[piece.part] += piece.end - piece.start
    late = parts.pop(LATE)
    claims = {
        "bubble": min(mean, stages),
        "imbalance": stages - mean,
        "transfer": messages - stages - parts["transfer"],
    }
    for part, seconds in claims.items():
        taken = min(late, max(0.0, seconds))
        parts[part] += taken
        late -= taken
    parts["late sender"] = late
    return parts


# -- What the recorded actions and messages cost, as `schedules.simulate` takes it -----------------


def measured_costs(records: Sequence[RankRecord], stages: int, slices: int = 1) -> Costs:
    """Return the mean costs of stages, and of each edge the median time of messages."""
    of_slices = [0.0] * slices
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)  # keys are op and stage
    for record in records:
        for step in record.steps:
            for action, start, end in step.actions:
                of_slices[action.microbatch % slices] += end - start
                seconds[action.op, action.stage].append(end - start)
    means = {kind: fmean(times) for kind, times in seconds.items()}
    each = range(stages)
    return Costs(
        forward=[means.get(("F", stage), 0.0) for stage in each],
        input_grad=[means.get(("I", stage), means.get(("B", stage), 0.0)) for stage in each],
        weight_grad=[means.get(("W", stage), 0.0) for stage in each],
        transfer=_transfers(records, stages),
        slices=of_slices if slices > 1 and min(of_slices) > 0 else None,
    )


def _transfers(records: Sequence[RankRecord], stages: int) -> list[float]:
    """Return for each edge the median time of messages that a rank waited for."""
    found: dict[int, list[float]] = defaultdict(list)
    waited = set()
    for target, record in enumerate(records):
        for number, step in enumerate(record.steps):
            for wait in step.waits:
                waited.add((target, number, wait.message))
    for each in deliveries(records):
        if (each.target, each.step, each.message) in waited:
            found[each.message[0]].append(max(0.0, each.received - each.sent))
    return [median(found[edge]) if edge in found else 0.0 for edge in range(stages)]


def of_mean_stages(costs: Costs, stages: int) -> Costs:
    """Return the costs of stages that are all like the mean one, with free messages."""

    def mean(name: str) -> float:
        measured = [*filter(None, costs.per_stage(name, stages))]
        return fmean(measured or [0.0])

    return Costs(
        mean("forward"), mean("input_grad"), mean("weight_grad"), transfer=0.0, slices=costs.slices
    )


def idle_times(schedule: Schedule, costs: Costs) -> list[tuple[float, float, float]]:
    """Return how long each rank of a pipeline idles in a step of three simulations.

    The first: were all stages alike and messages free. The second: with the costs of each stage,
    and messages free. The third: with the times of messages, too.
    """
    alike = _idle(schedule, of_mean_stages(costs, schedule.stages))
    free = _idle(schedule, replace(costs, transfer=0.0))
    return [*zip(alike, free, _idle(schedule, costs))]


def _idle(schedule: Schedule, costs: Costs) -> list[float]:
    timeline = simulate(schedule, costs)
    busy = [sum(map(timeline.duration, order)) for order in schedule.orders]
    return [timeline.makespan - seconds for seconds in busy]
