"""A large schedule in a pipeline: what one rank makes of it, and the limit beyond which none can prove it."""

import tracemalloc

import pytest

from mpipipe import schedules
from mpipipe.errors import ArgumentError
from mpipipe.pipeline.construction import construct_on_paper


@pytest.mark.parametrize(
    "name, chunks, microbatches",
    [("interleaved_1f1b", 2, 128), pytest.param("dualpipe_v", 2, 1024, marks=pytest.mark.long)],
)
def test_a_rank_of_a_large_pipeline_needs_little_memory(name, chunks, microbatches):
    tracemalloc.start()
    try:
        plan = construct_on_paper(
            lambda: schedules.by_name(name, ranks=128, chunks=chunks, microbatches=microbatches), 63
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 400 << 20
    assert len(plan.steps) >= 2 * chunks * microbatches and {each.peer for each in plan.sends} <= {62, 64}


@pytest.mark.parametrize("name, chunks", [("interleaved_1f1b", 2), ("v_min", 2)])
def test_a_schedule_that_no_rank_can_prove_in_seconds_is_refused_with_the_limit(name, chunks):
    with pytest.raises(ArgumentError, match="too large") as refusal:
        schedules.by_name(name, ranks=128, chunks=chunks, microbatches=4096)
    assert "at most 262,144 forwards" in str(refusal.value) and "4,096 microbatches" in str(refusal.value)
