"""Mean times of the stages of one rank, in the form that `schedules.simulate` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def mean_durations(totals: Mapping[tuple[str, int], Sequence], stages: int, recompute: bool) -> np.ndarray:
    """Return mean seconds of forward, input gradient and weight gradient, (3, stages); 0 for stages of other ranks.

    The time of an R counts as that of a forward. With `recompute` it counts as a part of the input gradient, since the
    user's schedule has no R.

    Parameters
    ----------
    totals : (op, stage) -> (seconds, count), of this rank
    stages : number of stages on all ranks
    recompute : whether the pipeline runs all forwards again
    """
    names = {"F": "F", "B": "B", "I": "B", "W": "W", "R": "B" if recompute else "F"}
    seconds, counts = np.zeros((2, 3, stages))
    for (op, stage), (total, count) in totals.items():
        place = "FBW".index(names[op]), stage  # a stage may have both B and I, since it may split some backwards only
        seconds[place] += total
        counts[place] += 0 if op == "R" and recompute else count
    return seconds / np.maximum(counts, 1)
