"""Schedules by name, and advice which one to take.

A new schedule is a function that returns a `Schedule`, such as those of classic.py, an entry in one
of the tables below, a test, and a line in docs/schedule-reference.md; CONTRIBUTING.md lists the
steps. A function in a table takes (ranks, microbatches) or (ranks, chunks, microbatches), and by
keyword `slices`; those of `WITH_COSTS` take `costs`, too. Pipelines take schedules of any function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpipipe.errors import ArgumentError
from mpipipe.schedules import building_blocks, checks, classic, zero_bubble
from mpipipe.schedules.checks import at_least_one, counts
from mpipipe.schedules.schedule import Schedule
from mpipipe.schedules.simulate import EQUAL_COSTS, SAME, Costs, simulate
from mpipipe.text import near

# With one stage on a rank, with two, and with any number.
ONE_STAGE: dict[str, Callable[..., Schedule]] = {
    "gpipe": classic.gpipe,
    "one_f_one_b": classic.one_f_one_b,
    "zero_bubble_h1": zero_bubble.zero_bubble_h1,
    "zero_bubble_2p": building_blocks.zero_bubble_2p,
}
TWO_STAGES: dict[str, Callable[..., Schedule]] = {
    "zero_bubble_v": zero_bubble.zero_bubble_v,
    "dualpipe_v": zero_bubble.dualpipe_v,
    "v_half": building_blocks.v_half,
    "v_min": building_blocks.v_min,
}
SEVERAL_STAGES: dict[str, Callable[..., Schedule]] = {
    "interleaved_1f1b": classic.interleaved_1f1b,
    "looped_bfs": classic.looped_bfs,
    "interleaved_zero_bubble": zero_bubble.interleaved_zero_bubble,
    "forward_only": classic.forward_only,
}
# Their order follows from the costs.
WITH_COSTS = {"zero_bubble_2p", "zero_bubble_v", "v_half", "v_min"}


def full_name(name: str) -> str:
    """Return the name of a schedule in the tables above: 1f1b is one_f_one_b."""
    return {"1f1b": "one_f_one_b"}.get(name, name)


def by_name(
    name: str,
    *,
    ranks: int,
    chunks: int = 1,
    microbatches: int,
    costs: Costs = EQUAL_COSTS,
    memory_limit: float | None = None,
    slices: int = 1,
) -> Schedule:
    """Build the schedule of a name; it is not checked yet, unless it has slices.

    ArgumentError is raised for an unknown name, and for a count below 1 or one that does not fit
    the schedule.

    Parameters
    ----------
    name : str
        gpipe, one_f_one_b (or 1f1b), zero_bubble_h1, zero_bubble_2p; with chunks interleaved_1f1b,
        looped_bfs, interleaved_zero_bubble, forward_only; with two chunks zero_bubble_v,
        dualpipe_v, v_half, v_min.
    ranks, chunks, microbatches : int
        P, V stages per rank, and M. A schedule on a V has two stages per rank, also by default.
    costs : Costs, optional
        Times of the stages, for zero_bubble_2p, zero_bubble_v, v_half and v_min; the others do not
        depend on them.
    memory_limit : float, optional
        Activations that a rank may hold at once, for zero_bubble_2p; the memory of the others is
        their own.
    slices : int, optional
        n: each micro-batch passes as n slices of its sequences, one after the other. Costs are
        those of a slice then, and activations count slices. M may be 1.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> schedule = schedules.by_name("interleaved_1f1b", ranks=4, chunks=2, microbatches=8)
    >>> schedule.stages, schedule.chunks
    (8, 2)
    >>> print(schedules.by_name("one_f_one_b", ranks=2, microbatches=1, slices=3).to_csv(), end="")
    0F0.0,0F0.1,0F0.2,0B0.2,0B0.1,0B0.0
    1F0.0,1F0.1,1F0.2,1B0.2,1B0.1,1B0.0
    """
    memory_limit = checks.limit(memory_limit)
    name = full_name(name)
    if name in SEVERAL_STAGES:
        return SEVERAL_STAGES[name](ranks, chunks, microbatches, slices=slices)
    if name not in (*ONE_STAGE, *TWO_STAGES):
        # PyTorch's classes are ScheduleGPipe, Schedule1F1B.
        word = str(name).lower().removeprefix("schedule")
        known = (*ONE_STAGE, *SEVERAL_STAGES, *TWO_STAGES)
        expected = " or ".join(near(word, known)) or f"one of {', '.join(known)}"
        raise ArgumentError("unknown schedule", found=f"name={name!r}", expected=expected)
    number = 1
    needed = "one stage"
    if name in TWO_STAGES:
        number = 2
        needed = "two stages"
    if at_least_one("chunks", chunks) not in (1, number):
        raise ArgumentError(
            f"the schedule {name} has {needed} per rank",
            found=f"chunks={chunks}",
            expected=f"chunks={number}",
            remedy=f"leave chunks out, or take one for any number: {', '.join(SEVERAL_STAGES)}",
        )
    options: dict[str, object] = {"slices": slices}
    if name in WITH_COSTS:
        options["costs"] = costs
    if name == "zero_bubble_2p":
        options["memory_limit"] = memory_limit
    return {**ONE_STAGE, **TWO_STAGES}[name](ranks, microbatches, **options)


def names(chunks: int) -> list[str]:
    """List the schedules of training with `chunks` stages per rank."""
    listing = [*SEVERAL_STAGES]
    listing.remove("forward_only")
    if chunks == 1:
        return [*ONE_STAGE, *listing]
    if chunks == 2:
        return [*listing, *TWO_STAGES]
    return listing


# -- Advice: how many micro-batches, and the schedule with the smallest bubble ---------------------


PER_RANK = 4  # GPipe (arXiv:1811.06965, section 2.3): with M >= 4P the bubble hardly counts


@dataclass(frozen=True)
class Advice:
    """A number of micro-batches and a schedule for it.

    Attributes
    ----------
    microbatches : int
        M, the number of micro-batches to cut a batch into.
    bubble_fraction : float
        Idle part of the ranks' time: idle / (ranks * makespan).
    schedule : str
        Its name, for `by_name`.
    peak_activations : int
        The largest number of chunk activations that a rank holds at once, each of one slice.
    """

    microbatches: int
    bubble_fraction: float
    schedule: str
    peak_activations: int


def advise(
    ranks: int,
    chunks: int = 1,
    microbatches: int | None = None,
    costs: Costs = EQUAL_COSTS,
    *,
    slices: int = 1,
) -> Advice:
    """Advise a number of micro-batches for 1F1B, or the fastest schedule for a given number.

    Parameters
    ----------
    ranks, chunks : int
        P and V, stages per rank, at least 1. Interleaving makes the bubble smaller.
    microbatches : int, optional
        M, if it is not to be chosen: all schedules of `by_name` that train with V stages per rank
        are simulated. Of those that are equally fast, the one that holds the fewest activations is
        taken. By default M is four for each rank, and the schedule is 1F1B over the chunks.
    costs : Costs, optional
        Times of the stages in the simulation; by default one unit for each of F, I and W.
    slices : int, optional
        n, slices of each sequence. M n is 4P or more then.

    Examples
    --------
    >>> from mpipipe.schedules import advise
    >>> advice = advise(ranks=4, chunks=2)
    >>> advice.microbatches, advice.schedule, round(advice.bubble_fraction, 3)
    (16, 'interleaved_1f1b', 0.086)
    >>> advise(ranks=4, microbatches=8).schedule
    'zero_bubble_h1'
    """
    tried = names(chunks)
    if microbatches is None:
        ranks, chunks, slices = counts(ranks=ranks, chunks=chunks, slices=slices)
        microbatches = -(-PER_RANK * ranks // slices)
        tried = ["one_f_one_b" if chunks == 1 else "interleaved_1f1b"]
    timelines = []
    for name in tried:
        schedule = by_name(
            name, ranks=ranks, chunks=chunks, microbatches=microbatches, slices=slices, costs=costs
        )
        timelines.append(simulate(schedule, costs))
    limit = (1 + SAME) * min(timeline.makespan for timeline in timelines)
    fast = [timeline for timeline in timelines if timeline.makespan <= limit]
    best = min(fast, key=lambda timeline: max(timeline.peak_activations))
    peak = max(best.peak_activations)
    return Advice(microbatches, best.bubble_fraction, best.schedule.name, peak)
