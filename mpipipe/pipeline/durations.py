"""How long the stages of one rank take, as `schedules.simulate` wants to know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def mean_durations(totals: Mapping[tuple[str, int], Sequence], stages: int, recompute: bool) -> np.ndarray:
    """Return mean seconds of forward, input gradient and weight gradient, (3, stages); 0 for stages of other ranks.

    An R is a forward. Where all forwards are run again for `recompute`, that is a part of the input gradient: the
    user's schedule knows no R.

    Parameters
    ----------
    totals : (op, stage) -> (seconds, count), of this rank
    stages : how many there are on all ranks
    recompute : whether all forwards are run again
    """
    names = {"F": "F", "B": "B", "I": "B", "W": "W", "R": "B" if recompute else "F"}
    seconds, counts = np.zeros((2, 3, stages))
    for (op, stage), (total, count) in totals.items():
        place = "FBW".index(names[op]), stage  # a stage may have B and I: some backwards in one piece
        seconds[place] += total
        counts[place] += 0 if op == "R" and recompute else count
    return seconds / np.maximum(counts, 1)
