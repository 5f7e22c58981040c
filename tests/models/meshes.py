"""The ways in which models of others are trained, and what is the same."""

from __future__ import annotations

from functools import partial

import numpy as np

from mpipipe import schedules

MICROBATCHES, STEPS, RATE = 4, 3, 0.05
interleaved = partial(schedules.interleaved_1f1b, chunks=2)
# (ranks of a pipeline, replicas, schedule, recompute)
MESHES = {
    "1": (1, 1, schedules.one_f_one_b, True),
    "2": (2, 1, schedules.one_f_one_b, False),
    "2 interleaved": (2, 1, interleaved, True),
    "4 ZB-H1": (4, 1, schedules.zero_bubble_h1, True),
    "2 ZB-H1 x 2": (2, 2, schedules.zero_bubble_h1, False),
}


def check_equal(found, expected):
    assert {*found} == {*expected}
    for key, array in expected.items():
        np.testing.assert_allclose(
            found[key], array, rtol=1e-9, atol=1e-9 * max(1, np.abs(array).max(initial=0)), err_msg=key
        )
