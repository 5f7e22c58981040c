"""Where the time of each step went, in eight parts that add up to it.

compute      actions of stages, with the loss
transfer     waits for messages that were sent and were not here yet, and what these waits hold up elsewhere
sums         sums over replicas: their start, and waits for them once all replicas have come
optimizer    the optimizer
overhead     what is none of this: agreement of the ranks, bookkeeping, copies

What is left are waits for others who were not there yet. Each second of them belongs to one of three:

bubble       as long as the rank would idle were all stages like the mean stage, with no time for messages; but no
             longer than it would idle with the mean costs of each stage
imbalance    as much longer as it would idle with the mean costs of each stage
late sender  the rest: a rank that came late, actions that did not last as long as others of their kind, overhead of the
             sender

How long a rank would idle is simulated with the recorded durations. Bubble, imbalance, and what messages hold up take
their seconds in this order, each no more than is left of the waits of the step. So nothing counts twice, no part is
negative, and a rank that is slower than the mean stage has no imbalance: the others wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpipipe.analysis.costs import idle_times
from mpipipe.analysis.record import RankRecord
from mpipipe.analysis.segments import LATE, Segment
from mpipipe.schedules import Costs, Schedule

PARTS = ("compute", "bubble", "imbalance", "late sender", "transfer", "sums", "optimizer", "overhead")


def parts_of_steps(
    records: Sequence[RankRecord], pieces: Sequence[Sequence[Sequence[Segment]]], schedule: Schedule, costs: Costs
) -> list[list[dict[str, float]]]:
    """Return the seconds of each part, for each rank, for each of its steps.

    Parameters
    ----------
    records : of all ranks
    pieces : of their steps, as `segments` gives them
    schedule : of the pipeline
    costs : the recorded ones
    """
    idle = idle_times(schedule, costs)
    return [
        [_parts(step, {name: seconds[record.position] for name, seconds in idle.items()}) for step in steps]
        for record, steps in zip(records, pieces)
    ]


def _parts(step: Sequence[Segment], idle: Mapping[str, float]) -> dict[str, float]:
    parts = dict.fromkeys(PARTS, 0.0)
    late = 0.0
    for piece in step:
        if piece.part == LATE:
            late += piece.end - piece.start
        else:
            parts[piece.part] += piece.end - piece.start
    claims = {
        "bubble": min(idle["mean"], idle["stages"]),
        "imbalance": idle["stages"] - idle["mean"],
        "transfer": idle["messages"] - idle["stages"] - parts["transfer"],
    }
    for part, seconds in claims.items():
        taken = min(late, max(0.0, seconds))
        parts[part] += taken
        late -= taken
    parts["late sender"] = late
    return parts


def mean_parts(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over steps of each part."""
    return {part: sum(step[part] for step in steps) / len(steps) for part in PARTS}
