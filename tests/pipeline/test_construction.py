"""A large schedule in a pipeline: what one rank makes of it."""

SCRIPT = """
import resource
from mpipipe import schedules
from mpipipe.comm import Tags
from mpipipe.pipeline.batch import BatchReader
from mpipipe.pipeline.plan import ActionPlan

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
schedule = schedules.by_name("interleaved_1f1b", ranks=128, chunks=2, microbatches=128)
schedules.check(schedule)
assert schedule.fingerprint
tags = Tags(schedule.placement, schedule.units, 32767, schedule.skip_ends)  # every MPI has this upper bound
BatchReader(schedule, 63, loss=None)
plan = ActionPlan(schedule, 63, tags)
print(peak() - before, len(plan.steps), *sorted({each.peer for each in plan.sends}))
"""


def test_a_rank_of_a_large_pipeline_needs_little_memory(launch):
    """In a process of its own, whose peak is that of the plan; a trace of memory would take longer than the plan."""
    job = launch(0, SCRIPT)
    kilobytes, steps, *peers = map(int, job.stdout.split())
    assert kilobytes < 400 << 10
    assert steps >= 4 * 128 and peers == [62, 64]
