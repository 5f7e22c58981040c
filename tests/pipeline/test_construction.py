"""A large schedule in a pipeline: what one rank makes of it, and that what is wrong is refused before a message."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from support import dense

from mpipipe import Pipeline, schedules
from mpipipe.comm.mailbox import Mailbox
from mpipipe.errors import ArgumentError, MismatchError, ScheduleError
from mpipipe.job import inprocess
from mpipipe.pipeline.construction import construct_on_paper


@pytest.mark.parametrize(
    "name, chunks, microbatches",
    [
        ("interleaved_1f1b", 2, 256),
        pytest.param("interleaved_1f1b", 2, 1024, marks=pytest.mark.long),
        pytest.param("dualpipe_v", 2, 1024, marks=pytest.mark.long),
        pytest.param("zero_bubble_2p", 1, 1024, marks=pytest.mark.long),
    ],
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


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("interleaved_1f1b", 2), ("zero_bubble_v", 2), ("v_min", 2)])
def test_a_schedule_that_no_rank_can_prove_in_seconds_is_refused_with_the_limit(name, chunks):
    with pytest.raises(ArgumentError, match="too large") as refusal:
        schedules.by_name(name, ranks=128, chunks=chunks, microbatches=4096)
    assert "at most 262,144 forwards" in str(refusal.value) and "4,096 microbatches" in str(refusal.value)


def without_the_last(order):
    return order[:-1]


def backwards(order):
    return tuple(action for op in "BF" for action in order if action.op == op)


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("change", [without_the_last, backwards])
def test_what_is_wrong_in_one_order_is_refused_on_all_ranks_before_a_message(monkeypatch, wrong, change):
    good = schedules.one_f_one_b(3, 4)
    orders = [change(order) if rank == wrong else order for rank, order in enumerate(good.orders)]
    schedule = replace(good, name="changed", orders=orders)
    made, make = [], Mailbox.__init__
    monkeypatch.setattr(Mailbox, "__init__", lambda *given, **options: made.append(given) or make(*given, **options))

    def job(comm):
        with pytest.raises(ScheduleError) as caught:
            Pipeline(dense.model(good, comm.rank), schedule, comm, loss=dense.mean_squared)
        return str(caught.value)

    found = inprocess.run(3, job)
    assert len(set(found)) == 1 and f"rank {wrong}" in found[0]
    assert not made


def test_ranks_with_other_orders_are_refused():
    one, other = schedules.one_f_one_b(3, 4), schedules.gpipe(3, 4)
    other = replace(other, name=one.name)

    def job(comm):
        schedule = other if comm.rank == 1 else one
        with pytest.raises(MismatchError, match="different pipelines"):
            Pipeline(dense.model(one, comm.rank), schedule, comm, loss=dense.mean_squared)

    inprocess.run(3, job)
