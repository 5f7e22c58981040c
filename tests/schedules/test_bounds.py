"""The bound on the time of any schedule: no schedule beats it, and small exact searches come close to it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.any_schedule import any_schedule

from mpipipe import schedules
from mpipipe.schedules import Costs, lower_bound, simulate


@given(schedule=any_schedule.filter(lambda made: not made.forwards_only), seed=st.integers(0, 1000))
def test_no_schedule_beats_the_bound_for_its_memory(schedule, seed):
    draw = random.Random(seed)
    costs = Costs(*[[draw.randint(1, 5) for _ in schedule.placement] for _ in range(4)])
    timeline = simulate(schedule, costs)
    assert lower_bound(schedule, costs) <= lower_bound(schedule, costs, max(timeline.peak_activations))
    assert lower_bound(schedule, costs, max(timeline.peak_activations)) <= timeline.makespan + 1e-9


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_bound_is_reached_where_no_rank_waits(ranks):
    for schedule, work in (
        (schedules.zero_bubble_2p(ranks, 4 * ranks), 3),
        (schedules.zero_bubble_v(ranks, 4 * ranks), 6),
    ):
        assert lower_bound(schedule) == simulate(schedule).makespan == work * 4 * ranks + ranks - 1
    # Without weight gradients the last rank has work from its first forward on, and what follows goes back to rank 0.
    plain, costs = schedules.one_f_one_b(ranks, 4 * ranks), Costs(1, 1, 0)
    assert lower_bound(plain, costs) == simulate(plain, costs).makespan == 2 * 4 * ranks + 2 * (ranks - 1)


@pytest.mark.parametrize("schedule", [schedules.forward_only(3, 1, 5), schedules.forward_only(2, 3, 4)])
def test_forwards_alone_have_a_bound_of_their_own(schedule):
    bound, makespan = lower_bound(schedule, Costs(transfer=0.25)), simulate(schedule, Costs(transfer=0.25)).makespan
    assert bound <= makespan < 1.2 * bound


def test_stages_that_train_nothing_have_no_backwards_in_the_bound():
    whole = schedules.one_f_one_b(3, 2)
    frozen = schedules.with_frozen(whole, {0, 1})
    assert lower_bound(frozen) <= simulate(frozen).makespan
    assert lower_bound(frozen) < lower_bound(whole)


@given(
    make=st.sampled_from([schedules.interleaved_1f1b, schedules.looped_bfs]),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_rounding_is_no_work_where_weights_cost_nothing(make, ranks, microbatches, seed):
    """As in fine-tuning with LoRA: sums of the same times in another order leave a rest."""
    draw = random.Random(seed)
    forward, input_grad = ([round(draw.uniform(0.5, 3), 2) for _ in range(2 * ranks)] for _ in range(2))
    costs, schedule = Costs(forward, input_grad, 0), make(ranks, 2, microbatches)
    timeline = simulate(schedule, costs)
    assert lower_bound(schedule, costs) <= timeline.makespan * (1 + 1e-9)
    assert lower_bound(schedule, costs, max(timeline.peak_activations)) <= timeline.makespan * (1 + 1e-9)


@pytest.mark.parametrize("recompute", [0.25, 2.0])
def test_a_forward_that_is_run_again_counts_with_its_own_time(recompute):
    """One rank is busy all the time, whatever running a forward again costs."""
    schedule = schedules.with_recompute(schedules.gpipe(1, 3))
    costs = Costs(forward=1, input_grad=2, weight_grad=3, recompute=recompute)
    expected = 3 * 6 + len(schedule.recomputed) * recompute
    assert simulate(schedule, costs).makespan == lower_bound(schedule, costs) == expected > 18


def test_activations_live_for_a_round_trip_and_no_more_at_once_than_the_memory_allows():
    """On rank 0 those of stages 0 and 2 live from 0 to 9 and from 2 to 7, until their W's: 14 for each micro-batch."""
    schedule = schedules.interleaved_1f1b(2, 2, 8)
    assert lower_bound(schedule, memory_limit=2) == 8 * 14 / 2 > lower_bound(schedule)
