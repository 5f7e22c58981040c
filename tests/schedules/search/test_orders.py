"""Orders as tasks: their time is that of `simulate`, and priorities and moves keep the limit."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe import schedules
from mpipipe.schedules import Costs, check, simulate
from mpipipe.schedules.search.anneal import Move, critical_moves, moved
from mpipipe.schedules.search.orders import Priorities, decide, fill_waits, score_of
from mpipipe.schedules.search.problem import NEVER, OrderProblem, tasks_of


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
    problem = OrderProblem(schedule.placement, microbatches, costs, None)
    makespan, _ = problem.replay(tasks_of(schedule))
    split = problem.schedule("split", tasks_of(schedule))
    check(split)
    assert makespan == simulate(split, costs).makespan <= simulate(schedule, costs).makespan


def test_orders_in_which_ranks_wait_for_each_other_never_end():
    problem = OrderProblem((0, 1), 1, Costs(), None)
    assert problem.replay([[0, 1, 2], [4, 3, 5]])[0] == NEVER


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 5), st.integers(0, 999))
def test_any_priorities_end_within_the_limit_where_forwards_leave_room(ranks, chunks, microbatches, more, seed):
    draw, costs = random.Random(seed), drawn_costs(ranks * chunks, seed)
    placement = (*range(ranks),) * chunks
    problem = OrderProblem(placement, microbatches, costs, chunks + more)
    numbers = [[draw.random() for _ in range(microbatches)] for _ in problem.seconds]
    makespan, orders = decide(problem, Priorities(numbers, draw.random(), draw.random(), reserved=True))
    made = problem.schedule("drawn", orders)
    check(made)
    timeline = simulate(made, costs)
    assert max(timeline.peak_activations) <= chunks + more
    assert timeline.makespan == pytest.approx(makespan)


def test_a_move_that_breaks_the_limit_is_not_made():
    orders = tasks_of(schedules.zero_bubble_h1(2, 3))  # rank 0: F F I W F I W I W
    tight, loose = (OrderProblem((0, 1), 3, Costs(), limit) for limit in (2, 3))
    assert moved(tight, orders, Move(rank=0, slot=4, earlier=3)) is None
    assert moved(loose, orders, Move(rank=0, slot=4, earlier=3)) == [[0, 0, 1, 0, 2, 1, 2, 1, 2], orders[1]]


def test_moves_lie_on_the_critical_path():
    """On one rank all actions are critical; each one may go ahead of the others, but not of one of its task."""
    problem = OrderProblem((0,), 2, Costs(), None)
    orders = [[0, 1, 2, 0, 1, 2]]
    moves = critical_moves(problem, orders, problem.replay(orders)[1])
    ahead = [(1, 0), (2, 1), (2, 0), (3, 2), (3, 1), (4, 3), (4, 2), (5, 4), (5, 3)]
    assert sorted((move.slot, move.earlier) for move in moves) == sorted(ahead)


# -- W's in the waits of an order of F's and I's: their scores are what a simulation of them says ----------------------


def without_weight_gradients(schedule):
    return [[[task for task in order if task % 3 != 2]] for order in tasks_of(schedule)]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_run_knows_what_its_simulation_says(seed, prompt):
    draw = random.Random(seed)
    ranks, microbatches, limit = draw.randint(1, 5), draw.randint(1, 9), draw.randint(2, 12)
    known = schedules.zero_bubble_h1(ranks, microbatches) if seed % 2 else schedules.zero_bubble_v(ranks, microbatches)
    costs = Costs(*[[draw.uniform(0.5, 2) for _ in known.placement] for _ in range(4)])
    problem = OrderProblem(known.placement, microbatches, costs, None)
    made = fill_waits(problem, without_weight_gradients(known), limit, draw.choice((0.01, 0.5, 1.0)), prompt=prompt)
    if made is not None:
        schedule = problem.schedule("filled", made.orders)
        schedules.check(schedule)
        assert made.score == pytest.approx(score_of(schedule, costs), rel=1e-12)
        assert max(simulate(schedule, costs).peak_activations) <= limit


def lateness(prompt, costs):
    """By how much a W makes the last I of the middle rank late."""
    known = schedules.zero_bubble_h1(3, 8)
    problem = OrderProblem(known.placement, 8, costs, None)
    made = fill_waits(problem, without_weight_gradients(known), 8, 0.01, prompt=prompt)
    spans = simulate(problem.schedule("filled", made.orders), costs).spans
    (number,) = (number for number, (action, *_) in enumerate(spans[1]) if str(action) == "1I7")
    (came,) = (end + costs.transfer for action, _, end in spans[2] if str(action) == "2I7")
    return spans[1][number][1] - came if spans[1][number - 1][0].op == "W" else 0.0


def test_no_weight_gradient_makes_the_last_input_gradient_of_a_rank_late_where_that_is_asked():
    every = [Costs(1, 1, 0.1 * tenths, 0.2) for tenths in range(1, 20)]
    assert max(lateness(False, costs) for costs in every) > 0.1
    assert max(lateness(True, costs) for costs in every) < 1e-9


def test_the_same_costs_make_the_same_orders_as_ever():
    """A plan that names a schedule by its costs means the same orders in the next version, too."""
    first, second = Costs([1, 2, 1, 1.5], [1.5, 1, 2, 1], [1, 0.5, 1, 1], 0.3), Costs([1, 2, 1, 3] * 2, 1.5, 0.5, 0.25)
    made = [schedules.zero_bubble_2p(4, 10, first, 6), schedules.v_half(4, 10, second), schedules.v_min(4, 10, second)]
    made.append(schedules.search(3, 8, Costs([1, 2, 1], [1, 1, 3], 1, 0.5), memory_limit=3, seconds=1000, steps=60))
    assert [schedule.fingerprint for schedule in made] == [
        6351574481137461765,
        4438965160947787698,
        521313789038503105,
        6109822902258935520,
    ]
