"""The plan of one rank: its steps by hand, messages that both ends name alike, and the window of receives by search."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe import schedules
from mpipipe.comm.tags import BACKWARD, FORWARD, Tags
from mpipipe.pipeline.plan import ActionPlan, receive_window

any_schedule = st.builds(
    lambda name, ranks, chunks, microbatches: schedules.by_name(
        name, ranks=ranks, chunks=chunks if name in ("interleaved_1f1b", "looped_bfs", "forward_only") else 1,
        microbatches=microbatches,
    ),
    st.sampled_from(["gpipe", "one_f_one_b", "zero_bubble_h1", "interleaved_1f1b", "looped_bfs", "forward_only"]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 9),
)  # fmt: skip


def plan_of(schedule, rank):
    return ActionPlan(schedule, rank, Tags(schedule.placement, schedule.microbatches, 32767, schedule.skip_ends))


def names(envelope):
    """(peer, edge, micro-batch, direction) of a message, None for none."""
    return envelope and (envelope.peer, envelope.edge, envelope.microbatch, envelope.direction)


def test_the_steps_of_the_first_and_the_last_stage():
    schedule = schedules.one_f_one_b(2, 2)
    first, last = (plan_of(schedule, rank).steps for rank in range(2))
    assert [str(step) for step in first] == ["0F0", "0F1", "0B0", "0B1"]
    assert [str(step) for step in last] == ["1F0", "1B0", "1F1", "1B1"]
    to, back = [(1, 1, m, FORWARD) for m in range(2)], [(1, 1, m, BACKWARD) for m in range(2)]
    assert [names(step.send) for step in first] == [*to, None, None]
    assert [names(step.receive) for step in first] == [None, None, *back]
    assert [names(step.receive) for step in last] == [(0, 1, 0, FORWARD), None, (0, 1, 1, FORWARD), None]
    assert [names(step.send) for step in last] == [None, (0, 1, 0, BACKWARD), None, (0, 1, 1, BACKWARD)]
    assert all(step.first and not step.last for step in first) and all(step.last and not step.first for step in last)
    assert [step.completes for step in first] == [False, False, False, True]


def test_a_split_backward_sends_after_the_input_gradient_and_completes_with_the_weight_gradient():
    steps = plan_of(schedules.zero_bubble_h1(2, 1), 1).steps
    assert [str(step) for step in steps] == ["1F0", "1I0", "1W0"]
    assert [names(step.send) for step in steps] == [None, (0, 1, 0, BACKWARD), None]
    assert [step.completes for step in steps] == [False, False, True]


def test_chunks_are_counted_on_their_rank_and_data_that_stays_there_makes_no_message():
    steps = plan_of(schedules.interleaved_1f1b(1, 3, 1), 0).steps
    assert [(step.stage, step.chunk) for step in steps if step.op == "F"] == [(0, 0), (1, 1), (2, 2)]
    assert all(step.receive is None and step.send is None for step in steps)
    looped = plan_of(schedules.interleaved_1f1b(2, 2, 1), 1).steps
    assert [(step.stage, step.chunk) for step in looped if step.op == "F"] == [(1, 0), (3, 1)]


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
    directions = len({action.op for order in schedule.orders for action in order} & {"F", "B", "I"})
    assert len(sent) == edges * schedule.microbatches * directions


@given(schedule=any_schedule)
def test_the_last_gradient_of_each_stage_completes_it(schedule):
    for rank in range(schedule.ranks):
        steps = plan_of(schedule, rank).steps
        last = {step.stage: number for number, step in enumerate(steps) if step.op in "BW"}
        assert {number for number, step in enumerate(steps) if step.completes} == set(last.values())


@pytest.mark.parametrize(
    "schedule, windows",
    [
        (schedules.gpipe(1, 4), [0]),  # nothing to receive
        (schedules.gpipe(2, 4), [1, 1]),  # each message is taken as soon as it is there
        # rank 0 sends its fourth forward while rank 1, after three, waits for its first gradient; likewise rank 1 to 2
        (schedules.one_f_one_b(4, 8), [1, 2, 2, 1]),
    ],
    ids=["one rank", "gpipe", "1f1b"],
)
def test_known_windows(schedule, windows):
    assert [plan_of(schedule, rank).window for rank in range(schedule.ranks)] == windows


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
                times.append((start, ends[source, "F" if forward else "B", step.microbatch]))

        def is_enough(window, times=times):
            """Receive number i is posted when the one `window` before it is taken."""
            return all(i < window or times[i - window][0] <= sent for i, (_, sent) in enumerate(times))

        if times:
            window = receive_window(schedules.simulate(schedule), rank)
            assert window >= 1 and is_enough(window)
            assert window == 1 or not is_enough(window - 1)
