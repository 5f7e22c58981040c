"""The plan of one rank: messages that both ends name alike, and the window of receives by search."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from support.any_schedule import any_schedule

from mpipipe import schedules
from mpipipe.comm.tags import Tags
from mpipipe.pipeline.plan import ActionPlan, receive_window


def plan_of(schedule, rank):
    return ActionPlan(schedule, rank, Tags(schedule.placement, schedule.microbatches, 32767, schedule.skip_ends))


@settings(max_examples=50)
@given(schedule=any_schedule, data=st.data())
def test_every_message_is_sent_once_and_received_once_under_the_same_name(schedule, data):
    pairs = [(a, b) for a in range(schedule.stages) for b in range(a + 2, schedule.stages)]
    drawn = data.draw(st.lists(st.sampled_from(pairs), max_size=4)) if pairs else []
    schedule = schedules.with_skips(schedule, {f"skip{number}": ends for number, ends in enumerate(drawn)})
    sent, received = Counter(), Counter()
    for rank in range(schedule.ranks):
        plan = plan_of(schedule, rank)
        assert [str(step) for step in plan.steps] == [str(action) for action in schedule.orders[rank]]
        assert plan.receives == [each for step in plan.steps for each in step.receives]
        sent.update((rank, *each) for step in plan.steps for each in step.sends)
        received.update((envelope.peer, rank, *envelope[1:]) for envelope in plan.receives)
    assert sent == received and set(sent.values()) <= {1}
    ends = [*zip(schedule.placement, schedule.placement[1:])]
    ends += [(schedule.placement[a], schedule.placement[b]) for a, b in schedule.skip_ends]
    edges = sum(here != there for here, there in ends)
    directions = 1 if schedule.forwards_only else 2
    assert len(sent) == edges * schedule.microbatches * directions


@settings(max_examples=50)
@given(schedule=any_schedule)
def test_the_last_gradient_of_each_stage_completes_it(schedule):
    for rank in range(schedule.ranks):
        steps = plan_of(schedule, rank).steps
        last = {step.stage: number for number, step in enumerate(steps) if step.op in "BW"}
        assert {number for number, step in enumerate(steps) if step.completes} == set(last.values())


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
