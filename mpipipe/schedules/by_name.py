"""Schedules by the name that a configuration or a command line gives."""

from __future__ import annotations

from mpipipe.errors import ArgumentError
from mpipipe.schedules import classic, zero_bubble
from mpipipe.schedules.schedule import Schedule, at_least_one

ONE_STAGE = {  # per rank
    "gpipe": classic.gpipe,
    "one_f_one_b": classic.one_f_one_b,
    "zero_bubble_h1": zero_bubble.zero_bubble_h1,
}
SEVERAL_STAGES = {
    "interleaved_1f1b": classic.interleaved_1f1b,
    "looped_bfs": classic.looped_bfs,
    "forward_only": classic.forward_only,
}


def by_name(name: str, *, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule `name`, which is the name of its function.

    Parameters
    ----------
    name : gpipe, one_f_one_b, interleaved_1f1b, looped_bfs, forward_only or zero_bubble_h1
    ranks, microbatches : P and M, at least 1
    chunks : V, stages per rank; 1 for the schedules that know no chunks

    Raises
    ------
    ArgumentError : an unknown name, a count below 1, chunks where the schedule has none
    """
    if name in SEVERAL_STAGES:
        return SEVERAL_STAGES[name](ranks, chunks, microbatches)
    if name not in ONE_STAGE:
        raise ArgumentError("unknown schedule", found=f"name={name!r}", expected="one of " + ", ".join(_signatures()))
    if at_least_one("chunks", chunks) != 1:
        raise ArgumentError(
            f"the schedule {name} has one stage per rank",
            found=f"chunks={chunks}",
            expected="chunks=1",
            remedy="take one with chunks: " + ", ".join(SEVERAL_STAGES),
        )
    return ONE_STAGE[name](ranks, microbatches)


def _signatures():
    yield from (f"{name}(ranks, microbatches)" for name in ONE_STAGE)
    yield from (f"{name}(ranks, chunks, microbatches)" for name in SEVERAL_STAGES)
