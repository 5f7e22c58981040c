"""The parts of a step: causes that are put in come out in the right part, in their size."""

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made_records import made

from mpipipe import schedules
from mpipipe.tracing import Trace
from mpipipe.tracing.segments import PARTS

F, B = 0.010, 0.020  # seconds of forward and backward
WITHIN = 0.02  # of the size of a cause


def even(action, step):
    return {"F": F, "B": B, "I": B / 2, "W": B / 2}[action.op]


def trace_of(schedule, seconds=even, **causes):
    return Trace(schedule, made(schedule, seconds, **causes))


def check_sums(trace):
    """The parts are not negative, and add up to each step of each rank."""
    for record, steps in zip(trace.records, trace.parts_of_steps().values()):
        for step, parts in zip(record.steps, steps):
            assert tuple(parts) == PARTS
            assert min(parts.values()) >= 0
            assert sum(parts.values()) == pytest.approx(step.end - step.start, rel=1e-9)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("ranks, microbatches", [(1, 3), (2, 2), (4, 8), (4, 3)])
def test_equal_stages_wait_for_the_bubble_alone(name, ranks, microbatches):
    """All ranks idle (P - 1) (F + B), and nothing else."""
    trace = trace_of(schedules.by_name(name, ranks=ranks, microbatches=microbatches))
    check_sums(trace)
    for parts in trace.parts().values():
        assert parts["compute"] == pytest.approx(microbatches * (F + B))
        assert parts["bubble"] == pytest.approx((ranks - 1) * (F + B))
        for part in PARTS[2:]:
            assert parts[part] == pytest.approx(0, abs=1e-12)


def test_imbalance_is_what_the_step_lasts_longer_than_with_mean_stages():
    """1F1B, by the model of the tests: the step of the stages as they are, and one of mean stages."""
    factors, schedule = [0.8, 1.7, 1.0, 1.1], schedules.one_f_one_b(4, 8)
    trace = trace_of(schedule, lambda action, step: even(action, step) * factors[action.stage])
    calm = made(schedule, lambda action, step: even(action, step) * fmean(factors))[0].steps[0].end
    longer = trace.records[0].steps[0].end - calm
    for rank, parts in trace.parts().items():
        expected = longer - 8 * (F + B) * (factors[rank] - fmean(factors))
        assert parts["imbalance"] == pytest.approx(max(0, expected), rel=1e-9)
        assert parts["late sender"] == parts["transfer"] == pytest.approx(0, abs=1e-12)
    check_sums(trace)
    slower = trace_of(schedule, lambda action, step: even(action, step) * (3 if action.stage == 2 else 1)).advice()
    assert slower.startswith("Give stage 2 less to do, which takes 2.00 x the mean stage: imbalance costs")


@pytest.mark.parametrize("edge", [1, 2, 3])
def test_a_slow_link_is_transfer_on_all_ranks(edge):
    """GPipe crosses each link once forward and once back on its longest path: two latencies, whoever waits for them."""
    link, schedule = 0.020, schedules.gpipe(4, 6)
    trace = trace_of(schedule, latency={edge: link}, steps=2)
    check_sums(trace)
    for parts in trace.parts().values():
        assert parts["transfer"] == pytest.approx(2 * link, rel=WITHIN)
        assert parts["bubble"] == pytest.approx(3 * (F + B))
        assert parts["late sender"] == pytest.approx(0, abs=WITHIN * link)
    found = trace.efficiencies()
    assert found.transfer == pytest.approx(9 * (F + B) / (9 * (F + B) + 2 * link))
    slower = trace_of(schedule, latency={edge: 10 * link}).advice()
    assert f"the messages between stages {edge - 1} and {edge}, which take 200 ms, or send less" in slower


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_comes_late_makes_the_others_wait_for_a_late_sender(rank):
    late, steps = 0.030, 3
    trace = trace_of(schedules.one_f_one_b(4, 8), late={rank: late}, optimizer=0.007, overhead=0.003, steps=steps)
    check_sums(trace)
    for number, parts in trace.parts().items():
        expected = 0 if number == rank else late
        assert parts["late sender"] == pytest.approx(expected, rel=WITHIN, abs=1e-12)
        assert (parts["optimizer"], parts["overhead"]) == pytest.approx((0.007, 0.003))
        assert parts["bubble"] == pytest.approx(3 * (F + B))
    heavy = trace_of(schedules.one_f_one_b(4, 8), late={rank: 1.0})
    assert heavy.advice().startswith(f"Find out why rank {rank} comes late, which the others wait for: late sender")


def test_jitter_is_late_sender():
    """What a step with durations that differ lasts beyond one with their means: by the model, not by `simulate`."""
    ranks, schedule, draw = 4, schedules.one_f_one_b(4, 8), random.Random(1)
    drawn = {action: even(action, 0) * draw.uniform(0.5, 1.5) for order in schedule.orders for action in order}
    means = {
        (op, stage): fmean(time for action, time in drawn.items() if (action.op, action.stage) == (op, stage))
        for op in "FB"
        for stage in range(ranks)
    }
    trace = trace_of(schedule, lambda action, step: drawn[action])
    calm = made(schedule, lambda action, step: means[action.op, action.stage])
    check_sums(trace)
    lost = trace.records[0].steps[0].end - calm[0].steps[0].end
    assert lost > 0.01
    for parts in trace.parts().values():
        assert parts["late sender"] == pytest.approx(lost, rel=WITHIN, abs=lost * WITHIN)
        assert parts["transfer"] == 0


def test_sums_count_once_the_last_replica_has_come():
    """Two replicas of one stage: the first waits 30 ms for the second, then both sum for 5 ms."""
    schedule = schedules.gpipe(1, 2)
    records = []
    for rank, late in ((0, 0.0), (1, 0.030)):
        (record,) = made(schedule, even)
        step, end = record.steps[0], 2 * (F + B)
        action, start, stop = step.actions[-1]
        actions = [*step.actions[:-1], (action, start, stop + late)]
        wait = step.waits[0]._replace(what="sums", start=end + late, end=end + 0.035, group=(7, 7), sums=True)
        steps = [step._replace(end=end + 0.035, actions=actions, waits=[wait], spans=[])]
        records.append(record._replace(rank=rank, replica=rank, steps=steps))
    trace = Trace(schedule, records)
    check_sums(trace)
    assert [parts["sums"] for parts in trace.parts().values()] == pytest.approx([0.005, 0.005])
    assert [parts["late sender"] for parts in trace.parts().values()] == pytest.approx([0.030, 0])


CASES = [("one_f_one_b", 1), ("interleaved_1f1b", 2), ("zero_bubble_h1", 1), ("zero_bubble_v", 2), ("looped_bfs", 2)]


@given(case=st.sampled_from(CASES), ranks=st.integers(2, 4), extra=st.integers(0, 4), seed=st.integers(0, 999))
def test_parts_add_up_whatever_happens(case, ranks, extra, seed):
    name, chunks = case
    schedule = schedules.by_name(name, ranks=ranks, chunks=chunks, microbatches=2 * ranks + extra)
    draw = random.Random(seed)
    some = lambda: draw.choice([0.0, draw.uniform(0, 0.05)])  # noqa: E731
    trace = trace_of(
        schedule,
        lambda action, step: even(action, step) * draw.uniform(0.2, 2),
        latency={edge: some() for edge in range(1, schedule.stages)},
        late={rank: some() for rank in range(ranks)},
        optimizer=some(),
        overhead=some(),
        steps=2,
    )
    check_sums(trace)
    found = trace.efficiencies()
    assert found.parallel == pytest.approx(found.load_balance * found.serialisation * found.transfer)
    assert all(0 < share <= 1 + 1e-12 for share in found)
    assert trace.advice().endswith(".") and trace.table().count("\n") >= ranks + 3


def test_efficiencies_of_a_step_by_hand():
    """Four ranks, 1F1B, one stage of 1.5: mean compute 9/8 c M, most 12/8 c M, and the step M c' + 3 c."""
    trace = trace_of(schedules.one_f_one_b(4, 8), lambda action, step: even(action, 0) * (1.5 if action.stage else 1))
    compute, whole = [1, 1.5, 1.5, 1.5], (8 * 1.5 + 1 + 1.5 + 1.5) / 8
    found = trace.efficiencies()
    assert found.load_balance == pytest.approx(fmean(compute) / 1.5)
    assert found.serialisation == pytest.approx(1.5 / whole)
    assert found.parallel == pytest.approx(fmean(compute) / whole)
    assert found.transfer == 1
