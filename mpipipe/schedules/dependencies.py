"""Which action's output an action waits for: the one place that knows the edges between stages."""

from __future__ import annotations

from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD


#     stage    0     1     2
#     F        F --> F --> F
#                          |
#     B, I     B <-- B <-- B      R and W wait for nobody
def source(stage: int, op: str, stages: int) -> int | None:
    """Give the stage whose F an F waits for, or whose B or I a B or I waits for, of the same micro-batch.

    Parameters
    ----------
    stage : int
        The logical stage of the action that waits.
    op : str
        Its op.
    stages : int
        The number of logical stages.

    Returns
    -------
    int or None
        The stage; None for an action that waits for no other stage.

    Examples
    --------
    >>> from mpipipe.schedules.dependencies import source
    >>> source(2, "F", stages=4), source(2, "I", stages=4), source(2, "W", stages=4), source(0, "F", stages=4)
    (1, 3, None, None)
    """
    if op == FORWARD:
        return stage - 1 if stage > 0 else None
    if op in (BACKWARD, INPUT_GRAD):
        return stage + 1 if stage < stages - 1 else None
    return None


def sources(op: str, stages: int) -> list[int]:
    """List `source` of every stage; -1 for None."""
    found = (source(stage, op, stages) for stage in range(stages))
    return [-1 if stage is None else stage for stage in found]
