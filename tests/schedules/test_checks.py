"""Limits of memory, and other arguments, that are no numbers."""

import numpy as np
import pytest

from mpipipe import schedules
from mpipipe.errors import ArgumentError

PLAIN = schedules.one_f_one_b(2, 4)
TAKERS = {
    "by_name": lambda limit: schedules.by_name("gpipe", ranks=2, microbatches=4, memory_limit=limit),
    "zero_bubble_2p": lambda limit: schedules.zero_bubble_2p(2, 4, memory_limit=limit),
    "with_recompute": lambda limit: schedules.with_recompute(PLAIN, memory_limit=limit),
    "lower_bound": lambda limit: schedules.lower_bound(PLAIN, memory_limit=limit),
    "lower_bound with R": lambda limit: schedules.lower_bound(
        schedules.with_recompute(PLAIN, memory_limit=1), memory_limit=limit
    ),
}


@pytest.mark.parametrize(
    "limit", ["2", [2], (2, 2), True, np.True_, float("nan"), 2j, pytest.param(object(), id="object")], ids=repr
)
@pytest.mark.parametrize("taker", TAKERS)
def test_a_limit_that_is_no_number_is_one_error(taker, limit):
    with pytest.raises(ArgumentError, match="memory_limit is no number"):
        TAKERS[taker](limit)
