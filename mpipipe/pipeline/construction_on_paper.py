"""The construction of a Pipeline on one rank of a large job, without MPI: all that grows with the size of the job.

`bench schedules` measures its time and memory.
"""

from __future__ import annotations

from collections.abc import Callable

from mpipipe.comm.tags import Tags, neighbours
from mpipipe.pipeline.batch import BatchReader
from mpipipe.pipeline.plan import Plan
from mpipipe.pipeline.ties import TieNames
from mpipipe.schedules import Schedule
from mpipipe.schedules.distributed_proof import check_part, digest

PROMISED_TAG_UB = 32767  # what every MPI offers


def construct_on_paper(build: Callable[[], Schedule], rank: int) -> Plan:
    """Build a schedule, and do with it what one rank does in the constructor of a Pipeline.

    Parameters
    ----------
    build : callable
        Returns the schedule.
    rank : int
        The rank.

    Returns
    -------
    Plan
        The plan of a training step on this rank.

    Raises
    ------
    ScheduleError
        The part of the proof that belongs to this rank fails.
    ArgumentError
        The messages of two ranks do not fit the tags.

    Examples
    --------
    >>> from mpipipe import schedules
    >>> from mpipipe.pipeline.construction_on_paper import construct_on_paper
    >>> len(construct_on_paper(lambda: schedules.one_f_one_b(ranks=1024, microbatches=4096), rank=7).steps)
    8192
    """
    schedule = build()
    check_part(schedule, rank)
    digest(schedule)
    tags = Tags(schedule.placement, schedule.microbatches, PROMISED_TAG_UB, schedule.skip_ends)
    TieNames([{} for _ in range(schedule.ranks)], tags.channels, tags.base)
    neighbours(schedule.placement, schedule.skip_ends)
    BatchReader(schedule, rank, loss=None)
    return Plan(schedule, rank, tags)
