"""A large schedule in a pipeline: what one rank makes of it, and the limit beyond which none can prove it."""

import pytest

from mpipipe import schedules
from mpipipe.errors import ArgumentError

SCRIPT = """
import resource
from mpipipe import schedules
from mpipipe.comm import Tags
from mpipipe.pipeline.batch import BatchReader
from mpipipe.pipeline.plan import ActionPlan

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
schedule = schedules.by_name(NAME, ranks=128, chunks=2, microbatches=COUNT)
schedules.check(schedule)
assert schedule.fingerprint
tags = Tags(schedule.placement, schedule.units, 32767, schedule.skip_ends)  # every MPI has this upper bound
BatchReader(schedule, 63, loss=None)
plan = ActionPlan(schedule, 63, tags)
print(peak() - before, len(plan.steps), *sorted({each.peer for each in plan.sends}))
"""


@pytest.mark.parametrize(
    "name, microbatches", [("interleaved_1f1b", 128), pytest.param("dualpipe_v", 1024, marks=pytest.mark.long)]
)
def test_a_rank_of_a_large_pipeline_needs_little_memory(launch, name, microbatches):
    """In a process of its own, whose peak is that of the plan; a trace of memory would take longer than the plan."""
    job = launch(0, f"NAME, COUNT = {name!r}, {microbatches}\n{SCRIPT}", timeout=200)
    kilobytes, steps, *peers = map(int, job.stdout.split())
    assert kilobytes < 400 << 10
    assert steps >= 4 * microbatches and peers == [62, 64]


@pytest.mark.parametrize("name, chunks", [("interleaved_1f1b", 2), ("v_min", 2)])
def test_a_schedule_that_no_rank_can_prove_in_seconds_is_refused_with_the_limit(name, chunks):
    with pytest.raises(ArgumentError, match="too large") as refusal:
        schedules.by_name(name, ranks=128, chunks=chunks, microbatches=4096)
    assert "at most 262,144 forwards" in str(refusal.value) and "4,096 microbatches" in str(refusal.value)
