"""The classic schedules against published orders and closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.any_schedule import NAMES, build

from mpipipe import schedules
from mpipipe.schedules import Costs, check, simulate

sizes = {"ranks": st.integers(1, 8), "microbatches": st.integers(1, 25)}


def by_chunk(schedule, rank):
    """The order of a rank in the notation F<chunk>.<micro-batch>."""
    return " ".join(f"{op}{stage // schedule.ranks}.{mb}" for stage, op, mb in schedule.orders[rank])


def plain(schedule, rank):
    """The order of a rank in the notation F<micro-batch>."""
    return " ".join(f"{op}{mb}" for _, op, mb in schedule.orders[rank])


@pytest.mark.parametrize(
    "ranks, microbatches, rank, order",
    [
        (2, 4, 0, "F0 F1 B0 F2 B1 F3 B2 B3"),
        (4, 4, 0, "F0 F1 F2 F3 B0 B1 B2 B3"),
        (4, 4, 3, "F0 B0 F1 B1 F2 B2 F3 B3"),
        (4, 6, 1, "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"),
        (4, 2, 0, "F0 F1 B0 B1"),
    ],
)
def test_1f1b_has_the_published_order(ranks, microbatches, rank, order):
    assert plain(schedules.one_f_one_b(ranks, microbatches), rank) == order


@pytest.mark.parametrize(
    "ranks, microbatches, rank, order",
    [
        (2, 4, 0, "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3"),
        (2, 4, 1, "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3"),
        (
            *(4, 8, 0),
            "F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 F1.3 F0.4 F0.5 F0.6 B1.0 F0.7 B1.1 F1.4 B1.2 F1.5 B1.3 F1.6 B0.0 "
            "F1.7 B0.1 B0.2 B0.3 B1.4 B1.5 B1.6 B1.7 B0.4 B0.5 B0.6 B0.7",
        ),
        (
            *(4, 8, 3),
            "F0.0 F0.1 F0.2 F0.3 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 F0.4 B0.0 F0.5 B0.1 F0.6 B0.2 F0.7 B0.3 "
            "F1.4 B1.4 F1.5 B1.5 F1.6 B1.6 F1.7 B1.7 B0.4 B0.5 B0.6 B0.7",
        ),
    ],
)
def test_interleaved_has_megatrons_order(ranks, microbatches, rank, order):
    assert by_chunk(schedules.interleaved_1f1b(ranks, 2, microbatches), rank) == order


def test_gpipe_looped_bfs_and_forward_only_have_their_orders():
    assert plain(schedules.gpipe(3, 3), 1) == "F0 F1 F2 B0 B1 B2"
    assert plain(schedules.gpipe(3, 3, backward="lifo"), 1) == "F0 F1 F2 B2 B1 B0"
    assert by_chunk(schedules.looped_bfs(2, 2, 3), 1) == "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 B0.0 B0.1 B0.2"
    assert by_chunk(schedules.forward_only(2, 2, 5), 0) == "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 F0.3 F0.4 F1.3 F1.4"


def test_interleaved_runs_for_every_size_with_ideal_bubble_and_peak():
    for ranks in range(1, 9):
        for chunks in range(1, 5):
            for microbatches in range(1, 26):
                schedule = schedules.interleaved_1f1b(ranks, chunks, microbatches)
                check(schedule)
                timeline = simulate(schedule, Costs(3, 2, 2))
                size = (ranks, chunks, microbatches)
                if microbatches >= ranks:
                    assert timeline.makespan == (microbatches * chunks + ranks - 1) * 7, size
                group = -(-microbatches // max(1, microbatches // ranks))
                assert timeline.peak_activations == [
                    min(microbatches * chunks, (chunks - 1) * group + 2 * (ranks - 1 - rank) + 1)
                    for rank in range(ranks)
                ], size


@given(**sizes, chunks=st.integers(1, 4))
def test_looped_schedules_have_the_interleaved_bubble_and_hold_everything_or_nothing(ranks, chunks, microbatches):
    timeline = simulate(schedules.looped_bfs(ranks, chunks, microbatches), Costs(3, 2, 2))
    forwards = schedules.forward_only(ranks, chunks, microbatches)
    if microbatches >= ranks:
        assert timeline.makespan == (microbatches * chunks + ranks - 1) * 7
        assert simulate(forwards, Costs(forward=2)).makespan == (microbatches * chunks + ranks - 1) * 2
    assert timeline.peak_activations == [microbatches * chunks] * ranks
    assert {action.op for order in forwards.orders for action in order} == {"F"}


@given(**sizes, chunks=st.integers(1, 4))
def test_weight_gradients_of_every_stage_come_in_ascending_order(ranks, chunks, microbatches):
    for name in {*NAMES} - {"forward_only"}:
        schedule = build(name, ranks, chunks, microbatches)
        summed = {stage: [] for stage in range(schedule.stages)}
        for order in schedule.orders:
            for stage, op, microbatch in order:
                if op in "BW":
                    summed[stage].append(microbatch)
        assert all(found == list(range(microbatches)) for found in summed.values()), schedule.name
