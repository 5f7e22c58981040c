"""The plan of one rank: the window of receives by search, and what that of a large schedule takes."""

from hypothesis import given, settings
from support.any_schedule import any_schedule

from mpipipe import schedules
from mpipipe.comm.tags import Tags
from mpipipe.pipeline.plan import ActionPlan, receive_window


def plan_of(schedule, rank):
    return ActionPlan(schedule, rank, Tags(schedule.placement, schedule.microbatches, 32767, schedule.skip_ends))


@settings(max_examples=50)
@given(schedule=any_schedule)
def test_the_window_is_the_smallest_with_which_each_receive_is_posted_before_its_message_is_sent(schedule):
    spans = schedules.simulate(schedule).spans
    ends = {(step.stage, "F" if step.op == "F" else "B", step.microbatch): end
            for row in spans for step, _, end in row if step.op != "W"}  # fmt: skip
    for rank in range(schedule.ranks):
        times = []  # (the step takes its message, the message was sent)
        for step, (_, start, _) in zip(plan_of(schedule, rank).steps, spans[rank]):
            if step.receive is not None:
                forward = step.op == "F"
                source = step.stage - 1 if forward else step.stage + 1
                times.append((start, ends[source, "F" if forward else "B", step.unit]))

        def is_enough(window, times=times):
            """Receive number i is posted when the one `window` before it is taken."""
            return all(i < window or times[i - window][0] <= sent for i, (_, sent) in enumerate(times))

        if times:
            window = receive_window(schedules.simulate(schedule), rank)
            assert window >= 1 and is_enough(window)
            assert window == 1 or not is_enough(window - 1)


# -- A large schedule ----------------------------------------------------------------------------------------------


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
