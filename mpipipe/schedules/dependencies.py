"""Dependencies between actions of different stages: whose output an action waits for. No other file states them."""

from __future__ import annotations

from mpipipe.schedules.action import BACKWARD, FORWARD, INPUT_GRAD


#     stage    0     1     2
#     F        F --> F --> F
#                          |
#     B, I     B <-- B <-- B      R and W wait for nobody
def source(stage: int, op: str, stages: int) -> int | None:
    """Return the stage for whose output an action waits: an F for an F, a B or I for a B or I, of its micro-batch.

    Parameters
    ----------
    stage : int
        The logical stage of the waiting action.
    op : str
        The op of the waiting action.
    stages : int
        The number of logical stages.

    Returns
    -------
    int or None
        The stage, or None if the action waits for no other stage.

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
    """Return `source` of every stage as a list, with -1 in place of None."""
    found = (source(stage, op, stages) for stage in range(stages))
    return [-1 if stage is None else stage for stage in found]
