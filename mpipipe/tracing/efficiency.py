"""The efficiencies of the POP project, and what to change first.

The POP Standard Metrics (https://co-design.pop-coe.eu/metrics) divide the share of time in which
ranks compute into factors, each at most 1, with C the time that a rank computes and T that of the
whole:

    parallel      mean C / T                             = load balance x serialisation x transfer
    load balance  mean C / max C
    serialisation max C / T on an ideal network          waits that no faster network would shorten
    transfer      T on an ideal network / T

On an ideal network messages take no time. T there is taken as T less the part "transfer" of the
rank that has most of it; no less than max C.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from statistics import fmean
from typing import NamedTuple

from mpipipe.schedules import Costs, Schedule
from mpipipe.text import text_table
from mpipipe.tracing.segments import PARTS

ENOUGH = 0.95  # share of the time from which nothing is worth changing


class Efficiencies(NamedTuple):
    """Shares between 0 and 1.

    Attributes
    ----------
    parallel : float
        The share of all ranks' time in which they compute; the product of the other three.
    load_balance : float
        Computing time of the mean rank, divided by that of the busiest rank.
    serialisation : float
        Computing time of the busiest rank, divided by the time of a step on a network that takes no
        time.
    transfer : float
        Time of a step on such a network, divided by the real time of a step.
    """

    parallel: float
    load_balance: float
    serialisation: float
    transfer: float


def efficiencies(parts: Mapping[int, Mapping[str, float]]) -> Efficiencies:
    """Compute the efficiencies of {rank: {part: seconds}}."""
    compute = [each["compute"] for each in parts.values()]
    whole = max(sum(each.values()) for each in parts.values())
    ideal = max(whole - max(each["transfer"] for each in parts.values()), *compute)
    most = max(compute)
    if most == 0:
        return Efficiencies(0.0, 1.0, 0.0, ideal / whole)
    return Efficiencies(fmean(compute) / whole, fmean(compute) / most, most / ideal, ideal / whole)


def advice(parts: Mapping[int, Mapping[str, float]], schedule: Schedule, costs: Costs) -> str:
    """Say in one sentence what to change first."""
    mean = mean_parts(parts.values())
    whole = sum(mean.values())
    if mean["compute"] >= ENOUGH * whole:
        return f"Nothing: the ranks compute {mean['compute'] / whole:.0%} of the time."
    part = max(PARTS[1:], key=lambda name: mean[name])
    what = {
        "bubble": f"take more micro-batches than {schedule.microbatches}, or a schedule with less "
        f"bubble than {schedule.name}",
        "imbalance": _slowest(schedule, costs),
        "late sender": _awaited(parts),
        "transfer": _slowest_edge(costs, schedule.stages),
        "sums": "take larger batches, with more micro-batches in a step, or fewer replicas",
        "optimizer": "take larger batches, so that there are fewer steps of the optimizer",
        "reading": "read faster, or less: a batch is read while the step before it computes",
        "overhead": "take larger micro-batches, so that there is more work in each action",
    }[part]
    title = part
    if part == "bubble":
        title = "the schedule's bubble"
    return f"{what[0].upper()}{what[1:]}: {title} costs {mean[part] / whole:.0%} of the time."


def _slowest(schedule: Schedule, costs: Costs) -> str:
    stages = schedule.stages
    again = Counter(stage for stage, _ in schedule.recomputed)
    seconds = []
    for stage, forward in enumerate(costs.per_stage("forward", stages)):
        seconds.append(forward * (1 + again[stage] / schedule.units))
    for name in ("input_grad", "weight_grad"):
        for stage, backward in enumerate(costs.per_stage(name, stages)):
            seconds[stage] += backward
    most = max(seconds)
    times = most / fmean(seconds)
    return f"give stage {seconds.index(most)} less to do, which takes {times:.2f} x the mean stage"


def _slowest_edge(costs: Costs, stages: int) -> str:
    times = [*costs.per_stage("transfer", stages)]
    edge = times.index(max(times))
    return (
        f"speed up the messages between stages {edge - 1} and {edge}, which take "
        f"{times[edge] * 1e3:.3g} ms, or send less in each"
    )


def _awaited(parts: Mapping[int, Mapping[str, float]]) -> str:
    """Name the rank that the others wait for: it waits far less than they do."""
    late = {rank: each["late sender"] for rank, each in parts.items()}
    rank = min(late, key=late.__getitem__)
    if len(late) > 1 and late[rank] < 0.5 * fmean(late.values()):
        return f"find out why rank {rank} comes late, which the others wait for"
    return (
        "find out why actions of one kind do not all last as long: other programs, clock "
        "rates, garbage collection"
    )


# -- The parts of the time as a table for a terminal -----------------------------------------------


MOST = 16  # ranks with a row of their own


def table(parts: Mapping[int, Mapping[str, float]]) -> str:
    """Return a table of {rank: {part: seconds}} in milliseconds and percent of a step.

    Of more than 16 ranks, those with the most and the least compute are shown.
    """
    shown = sorted(parts, key=lambda rank: parts[rank]["compute"])
    del shown[MOST // 2 : -MOST // 2]  # nothing, if there are few
    rows = [[str(rank), *_cells(parts[rank])] for rank in sorted(shown)]
    if len(parts) > 1:
        rows.append(["mean", *_cells(mean_parts(parts.values()))])
    return "\n".join(text_table(["rank", "step", *PARTS], rows, left=()))


def mean_parts(all_parts: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each part, over ranks or steps."""
    means = {}
    for part in PARTS:
        means[part] = fmean(parts[part] for parts in all_parts)
    return means


def _cells(parts: Mapping[str, float]) -> list[str]:
    whole = sum(parts.values())
    cells = [f"{whole * 1e3:.1f} ms"]
    for part in PARTS:
        cells.append(f"{100 * parts[part] / whole:.1f} %" if whole else "")
    return cells
