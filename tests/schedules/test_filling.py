"""Schedules with W's in their waits: their scores are what a simulation of them says."""

from __future__ import annotations

import random

import pytest

from mpipipe import schedules
from mpipipe.schedules import Costs, simulate
from mpipipe.schedules.kinds import Form, kinds_of
from mpipipe.schedules.list_scheduler import filled, score_of


def without_weight_gradients(schedule):
    return [[[kind for kind in order if kind % 3 != 2]] for order in kinds_of(schedule)]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_run_knows_what_its_simulation_says(seed, prompt):
    draw = random.Random(seed)
    ranks, microbatches, limit = draw.randint(1, 5), draw.randint(1, 9), draw.randint(2, 12)
    known = schedules.zero_bubble_h1(ranks, microbatches) if seed % 2 else schedules.zero_bubble_v(ranks, microbatches)
    costs = Costs(*[[draw.uniform(0.5, 2) for _ in known.placement] for _ in range(4)])
    form = Form(known.placement, microbatches, costs, None)
    made = filled(form, without_weight_gradients(known), limit, draw.choice((0.01, 0.5, 1.0)), prompt=prompt)
    if made is not None:
        schedule = form.schedule("filled", made.orders)
        schedules.check(schedule)
        assert made.score == pytest.approx(score_of(schedule, costs), rel=1e-12)
        assert max(simulate(schedule, costs).peak_activations) <= limit


def lateness(prompt, costs):
    """By how much a W makes the last I of the middle rank late."""
    known = schedules.zero_bubble_h1(3, 8)
    form = Form(known.placement, 8, costs, None)
    made = filled(form, without_weight_gradients(known), 8, 0.01, prompt=prompt)
    spans = simulate(form.schedule("filled", made.orders), costs).spans
    (number,) = (number for number, (action, *_) in enumerate(spans[1]) if str(action) == "1I7")
    (came,) = (end + costs.transfer for action, _, end in spans[2] if str(action) == "2I7")
    return spans[1][number][1] - came if spans[1][number - 1][0].op == "W" else 0.0


def test_no_weight_gradient_makes_the_last_input_gradient_of_a_rank_late_where_that_is_asked():
    every = [Costs(1, 1, 0.1 * tenths, 0.2) for tenths in range(1, 20)]
    assert max(lateness(False, costs) for costs in every) > 0.1
    assert max(lateness(True, costs) for costs in every) < 1e-9
