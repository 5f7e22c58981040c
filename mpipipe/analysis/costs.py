"""What the recorded actions and messages cost, as `schedules.simulate` takes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from mpipipe.analysis.deliveries import deliveries
from mpipipe.analysis.record import RankRecord
from mpipipe.schedules import Costs, Schedule, Timeline, simulate

Durations = dict[tuple[str, int], list[float]]  # (op, stage) -> seconds of each


def durations(records: Sequence[RankRecord]) -> Durations:
    """Return the seconds of all recorded actions, by (op, stage)."""
    found: Durations = defaultdict(list)
    for record in records:
        for step in record.steps:
            for action, start, end in step.actions:
                found[action.op, action.stage].append(end - start)
    return found


def measured_costs(records: Sequence[RankRecord], stages: int) -> Costs:
    """Return the mean costs of each stage, and of each edge the median time of messages that were waited for."""
    means = {kind: fmean(seconds) for kind, seconds in durations(records).items()}
    each = range(stages)
    return Costs(
        forward=[means.get(("F", stage), 0.0) for stage in each],
        input_grad=[means.get(("I", stage), means.get(("B", stage), 0.0)) for stage in each],
        weight_grad=[means.get(("W", stage), 0.0) for stage in each],
        transfer=_transfers(records, stages),
    )


def _transfers(records: Sequence[RankRecord], stages: int) -> list[float]:
    """For each edge the median time from the sending of a message to its arrival, where somebody waited for that."""
    found: dict[int, list[float]] = defaultdict(list)
    waited = {
        (target, number, wait.message)
        for target, record in enumerate(records)
        for number, step in enumerate(record.steps)
        for wait in step.waits
    }
    for each in deliveries(records):
        if (each.target, each.step, each.message) in waited:
            found[each.message[0]].append(max(0.0, each.received - each.sent))
    return [median(found[edge]) if edge in found else 0.0 for edge in range(stages)]


def of_mean_stages(costs: Costs, stages: int) -> Costs:
    """Return the costs of stages that are all like the mean of those that cost anything, with free messages."""

    def mean(values: Sequence[float]) -> float:
        counted = [value for value in values if value > 0]
        return fmean(counted) if counted else 0.0

    names = ("forward", "input_grad", "weight_grad")
    return Costs(**{name: mean(costs.per_stage(name, stages)) for name in names}, transfer=0.0)


def idle_times(schedule: Schedule, costs: Costs) -> Mapping[str, list[float]]:
    """Return how long each rank of a pipeline idles in a step of the simulation.

    "mean": were all stages alike and messages free. "stages": with the costs of each stage, and messages free.
    "messages": with the times of messages, too.
    """
    return {
        "mean": _idle(simulate(schedule, of_mean_stages(costs, schedule.stages))),
        "stages": _idle(simulate(schedule, replace(costs, transfer=0.0))),
        "messages": _idle(simulate(schedule, costs)),
    }


def _idle(timeline: Timeline) -> list[float]:
    busy = [sum(timeline.durations[action.op][action.stage] for action in order) for order in timeline.schedule.orders]
    return [timeline.makespan - seconds for seconds in busy]
