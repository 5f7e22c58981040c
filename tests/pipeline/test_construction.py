"""Large schedules in a pipeline: what one rank of many makes, and that the parts of the proof stand for the whole."""

from __future__ import annotations

import tracemalloc
from functools import partial

import pytest
from support import dense

from mpipipe import Pipeline, schedules
from mpipipe.comm.mailbox import Mailbox
from mpipipe.errors import MismatchError, ScheduleError
from mpipipe.job import inprocess
from mpipipe.pipeline.construction import construct_on_paper
from mpipipe.schedules import Schedule, proof
from mpipipe.schedules.action import OrdersOnDemand

NAMES = [("gpipe", 1), ("one_f_one_b", 1), ("zero_bubble_h1", 1), ("zero_bubble_2p", 1), ("interleaved_1f1b", 2),
         ("looped_bfs", 2), ("interleaved_zero_bubble", 2), ("zero_bubble_v", 2), ("dualpipe_v", 2)]  # fmt: skip


@pytest.fixture
def divided(monkeypatch):
    """Small schedules are proven in parts, too; nobody simulates one."""
    monkeypatch.setattr(proof, "WHOLE", 0)


@pytest.mark.parametrize(
    "name, chunks, microbatches",
    [
        ("interleaved_1f1b", 2, 1024),
        pytest.param("one_f_one_b", 1, 4096, marks=pytest.mark.long),
        pytest.param("dualpipe_v", 2, 1024, marks=pytest.mark.long),
        pytest.param("zero_bubble_2p", 1, 4096, marks=pytest.mark.long),
    ],
)
def test_a_rank_of_a_large_job_needs_little_memory(name, chunks, microbatches):
    build = partial(schedules.by_name, name, ranks=1024, chunks=chunks, microbatches=microbatches)
    tracemalloc.start()
    try:
        plan = construct_on_paper(build, 511)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 << 20
    assert len(plan.steps) >= 2 * chunks * microbatches and {each.peer for each in plan.sends} <= {510, 512}


@pytest.mark.parametrize("name, chunks", NAMES)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_schedule_that_is_proven_in_parts_trains(divided, name, chunks, recompute):
    schedule = schedules.by_name(name, ranks=3, chunks=chunks, microbatches=7)
    inprocess.run(3, lambda comm: dense.check(comm, schedule, rows=14, recompute=recompute))
    assert not schedule.proven


def without_the_last(schedule, wrong, rank):
    order = schedule.orders[rank]
    return order[:-1] if rank == wrong else order


def backwards(schedule, wrong, rank):
    order = schedule.orders[rank]
    return tuple(action for op in "BF" for action in order if action.op == op) if rank == wrong else order


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("change", [without_the_last, backwards])
def test_what_is_wrong_on_one_rank_is_refused_on_all_before_a_message(divided, monkeypatch, wrong, change):
    good = schedules.one_f_one_b(3, 4)
    orders = OrdersOnDemand(3, partial(change, good, wrong), good.orders.logical_time)
    schedule = Schedule("changed", good.placement, 4, orders)
    made, make = [], Mailbox.__init__
    monkeypatch.setattr(Mailbox, "__init__", lambda *given, **options: made.append(given) or make(*given, **options))

    def job(comm):
        with pytest.raises(ScheduleError) as caught:
            Pipeline(dense.model(good, comm.rank), schedule, comm, loss=dense.mean_squared)
        return str(caught.value), caught.value.reported_elsewhere

    found = inprocess.run(3, job)
    assert len({text for text, _ in found}) == 1 and [elsewhere for _, elsewhere in found].count(False) == 1
    assert f"rank {wrong}" in found[0][0]
    assert not made


def test_ranks_with_orders_that_are_made_in_another_way_are_refused(divided):
    one, other = schedules.one_f_one_b(3, 4), schedules.gpipe(3, 4)
    other = Schedule(one.name, other.placement, 4, other.orders)

    def job(comm):
        schedule = other if comm.rank == 1 else one
        with pytest.raises(MismatchError, match="different pipelines"):
            Pipeline(dense.model(one, comm.rank), schedule, comm, loss=dense.mean_squared)

    inprocess.run(3, job)
