"""The proof of large schedules in parts: logical times that rise, and wrong orders that are refused."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe import schedules
from mpipipe.errors import ScheduleError
from mpipipe.schedules import Schedule, proof
from mpipipe.schedules.action import OrdersOnDemand
from mpipipe.schedules.classic import grouped
from mpipipe.schedules.proof import check_part, digest, logical_time_of, recomputed_on, trains
from mpipipe.schedules.recompute import before_backwards

ON_A_V = ["zero_bubble_v", "dualpipe_v"]
LOOPED = ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "forward_only"]
any_schedule = st.builds(
    lambda name, ranks, chunks, microbatches: schedules.by_name(
        name, ranks=ranks, microbatches=microbatches,
        chunks=chunks if name in LOOPED else 2 if name in ON_A_V else 1,
    ),
    st.sampled_from(["gpipe", "one_f_one_b", "zero_bubble_h1", *LOOPED, *ON_A_V]),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 40),
)  # fmt: skip


@pytest.fixture
def divided(monkeypatch):
    """Small schedules are proven in parts, too."""
    monkeypatch.setattr(proof, "WHOLE", 0)


def falls_back(schedule, rank):
    raise AssertionError(f"the logical times of {schedule} do not rise on rank {rank}")


@settings(max_examples=300)
@given(schedule=any_schedule, change=st.sampled_from(["none", "R", "frozen", "forward"]), data=st.data())
def test_the_logical_times_of_every_schedule_rise(schedule, change, data):
    if change == "R":
        schedule = before_backwards(schedule)
    elif change == "frozen" and schedule.stages > 1:
        stages = st.sets(st.integers(0, schedule.stages - 1), max_size=schedule.stages - 1)
        schedule = schedules.with_frozen(schedule, data.draw(stages))
    elif change == "forward":
        schedule = schedule.forward_only_part(data.draw(st.integers(1, schedule.microbatches)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "WHOLE", 0)
        patch.setattr(proof, "check", lambda schedule: falls_back(schedule, rank))
        assert logical_time_of(schedule) is not None
        for rank in range(schedule.ranks):
            check_part(schedule, rank)
            assert recomputed_on(schedule, rank) == {pair for pair in schedule.recomputed
                                                     if schedule.placement[pair[0]] == rank}  # fmt: skip
        assert trains(schedule) is not schedule.forwards_only
    schedules.check(schedule)


def changed_order(schedule, wrong, slots, rank):
    """The order of a rank; that of rank `wrong` with slots exchanged, or without the last action."""
    order = list(schedule.orders[rank])
    if rank == wrong and slots:
        first, second = slots
        order[first], order[second] = order[second], order[first]
    elif rank == wrong:
        order.pop()
    return order


@given(schedule=any_schedule, data=st.data())
def test_a_wrong_schedule_is_refused_on_a_rank_with_the_error_of_the_whole_proof(schedule, data):
    wrong = data.draw(st.integers(0, schedule.ranks - 1))
    slot = st.integers(0, len(schedule.orders[wrong]) - 1)
    slots = data.draw(st.one_of(st.none(), st.tuples(slot, slot)))
    orders = OrdersOnDemand(
        schedule.ranks, partial(changed_order, schedule, wrong, slots), logical_time=schedule.orders.logical_time
    )
    mutated = Schedule("mutated", schedule.placement, schedule.microbatches, orders)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "WHOLE", 0)
        refused = []
        for rank in range(schedule.ranks):
            try:
                check_part(mutated, rank)
            except ScheduleError as error:
                refused.append(str(error))
    try:
        schedules.check(Schedule("whole", schedule.placement, schedule.microbatches, [*orders]))
    except ScheduleError as error:
        assert refused and (slots is None or str(error) in refused)
    else:
        assert all("does not rise" in text for text in refused)  # it can run, in another order


def ranks_that_wait_for_each_other(rank):
    return schedules.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n").orders[rank]


def test_a_deadlock_names_its_cycle(divided):
    schedule = Schedule(
        "stuck", (0, 1), 2, OrdersOnDemand(2, ranks_that_wait_for_each_other, partial(grouped, 2, 1, 2, 1))
    )
    with pytest.raises(ScheduleError, match="deadlock: rank 0 at 0B0 waits for 1B0"):
        for rank in range(2):
            check_part(schedule, rank)


def test_ranks_compare_how_large_schedules_are_made(divided):
    schedule = schedules.one_f_one_b(4, 8)
    others = [
        schedules.zero_bubble_h1(4, 8),
        schedules.one_f_one_b(4, 9),
        before_backwards(schedule),
        schedules.with_frozen(schedule, {0}),
        schedules.with_frozen(schedule, {1}),
        Schedule("x", (1, 0, 2, 3), 8, schedule.orders),
        Schedule("x", schedule.placement, 8, [*schedule.orders]),
    ]
    assert len({digest(other) for other in [schedule, *others]}) == 1 + len(others)
    assert digest(schedules.one_f_one_b(4, 8)) == digest(pickle.loads(pickle.dumps(schedule))) == digest(schedule)


def test_small_schedules_are_proven_and_compared_as_a_whole():
    schedule = schedules.one_f_one_b(4, 8)
    assert logical_time_of(schedule) is None and digest(schedule) == f"{schedule.fingerprint:x}"
    check_part(schedule, 2)
    assert schedule.proven


def test_orders_on_demand_are_a_tuple_to_look_at():
    schedule = schedules.interleaved_1f1b(3, 2, 5)
    whole = tuple(schedule.orders)
    assert schedule.orders == whole and whole == schedule.orders and hash(schedule.orders) == hash(whole)
    assert (schedule.orders[1], schedule.orders[-1], schedule.orders[::-1]) == (whole[1], whole[2], whole[::-1])
    assert schedule == schedules.interleaved_1f1b(3, 2, 5) != schedules.interleaved_1f1b(3, 2, 6)
    assert Schedule(schedule.name, schedule.placement, 5, whole) == schedule
    with pytest.raises(IndexError):
        schedule.orders[3]
