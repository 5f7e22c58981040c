"""Orders as kinds: their time is that of `simulate`, and priorities and moves keep the limit."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe import schedules
from mpipipe.schedules import Costs, check, simulate
from mpipipe.schedules.improve import Move, Priorities, critical_moves, decide, moved
from mpipipe.schedules.kinds import NEVER, Form, kinds_of


def drawn_costs(stages, seed):
    draw = random.Random(seed)
    return Costs(*[[draw.randint(1, 5) for _ in range(stages)] for _ in range(4)])


@given(
    name=st.sampled_from(["gpipe", "one_f_one_b", "zero_bubble_h1", "interleaved_zero_bubble", "v_half", "dualpipe_v"]),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_a_replay_takes_the_time_of_the_simulation(name, ranks, microbatches, seed):
    chunks = 2 if name in ("interleaved_zero_bubble", "v_half", "dualpipe_v") else 1
    schedule = schedules.by_name(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
    costs = drawn_costs(schedule.stages, seed)
    form = Form(schedule.placement, microbatches, costs, None)
    makespan, _ = form.replay(kinds_of(schedule))
    split = form.schedule("split", kinds_of(schedule))
    check(split)
    assert makespan == simulate(split, costs).makespan <= simulate(schedule, costs).makespan


def test_orders_in_which_ranks_wait_for_each_other_never_end():
    form = Form((0, 1), 1, Costs(), None)
    assert form.replay([[0, 1, 2], [4, 3, 5]])[0] == NEVER


@settings(max_examples=40)
@given(
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 3),
    microbatches=st.integers(1, 6),
    more=st.integers(0, 5),
    seed=st.integers(0, 999),
)
def test_any_priorities_end_within_the_limit_where_forwards_leave_room(ranks, chunks, microbatches, more, seed):
    draw, costs = random.Random(seed), drawn_costs(ranks * chunks, seed)
    placement = (*range(ranks),) * chunks
    form = Form(placement, microbatches, costs, chunks + more)
    numbers = [[draw.random() for _ in range(microbatches)] for _ in form.seconds]
    makespan, orders, _ = decide(form, Priorities(numbers, draw.random(), draw.random(), reserved=True))
    made = form.schedule("drawn", orders)
    check(made)
    timeline = simulate(made, costs)
    assert max(timeline.peak_activations) <= chunks + more
    assert timeline.makespan == pytest.approx(makespan)


def test_a_move_that_breaks_the_limit_is_not_made():
    orders = kinds_of(schedules.zero_bubble_h1(2, 3))  # rank 0: F F I W F I W I W
    tight, loose = (Form((0, 1), 3, Costs(), limit) for limit in (2, 3))
    assert moved(tight, orders, Move(rank=0, slot=4, earlier=3)) is None
    assert moved(loose, orders, Move(rank=0, slot=4, earlier=3)) == [[0, 0, 1, 0, 2, 1, 2, 1, 2], orders[1]]


def test_moves_lie_on_the_critical_path():
    """On one rank all actions are critical; each one may go ahead of the others, but not of one of its kind."""
    form = Form((0,), 2, Costs(), None)
    orders = [[0, 1, 2, 0, 1, 2]]
    found = critical_moves(form, orders, form.replay(orders)[1])
    assert {(move.slot, move.earlier) for move in found} == {
        (1, 0),
        (2, 1),
        (2, 0),
        (3, 2),
        (3, 1),
        (4, 3),
        (4, 2),
        (5, 4),
        (5, 3),
    }
