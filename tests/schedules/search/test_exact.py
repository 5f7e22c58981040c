"""The exact optimum of small cases: by OR-Tools, against search through all orders, and what the bound says of it."""

from __future__ import annotations

import random
import sys

import pytest

from mpipipe import schedules
from mpipipe.errors import BackendError
from mpipipe.schedules import Costs, Schedule, check, lower_bound, optimum, simulate

pytest.importorskip("ortools")

LOOPED, ON_A_V, LONE = (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2)
CASES = [
    (placement, microbatches, limit, seed)
    for placement, microbatches in ((LOOPED, 3), (ON_A_V, 3), (LONE, 4), ((0, 0, 1), 3))
    for limit in (2, 3, 4)
    for seed in (0, 1)
]


@pytest.mark.parametrize("placement, microbatches, limit, seed", CASES)
def test_the_bound_is_not_above_the_optimum(placement, microbatches, limit, seed):
    draw = random.Random(f"{placement} {limit} {seed}")
    costs = Costs(*[[draw.randint(1, 4) for _ in placement] for _ in range(4)])
    found = optimum(placement, microbatches, costs, memory_limit=limit)
    check(found.schedule)
    timeline = simulate(found.schedule, costs)
    assert max(timeline.peak_activations) <= limit
    assert found.makespan == timeline.makespan == found.bound
    form = Schedule("form", placement, microbatches, orders=())
    assert lower_bound(form, costs, limit) <= found.makespan
    assert lower_bound(form, costs) <= lower_bound(form, costs, limit)


@pytest.mark.parametrize("ranks, microbatches, limit, best", [(2, 3, 2, 10), (4, 8, 4, 27), (4, 8, 2, 41)])
def test_the_optimum_of_equal_costs(ranks, microbatches, limit, best):
    """10: see ZB-H1's makespan; 27: its closed form, which is the bound; 41: by search through all orders."""
    found = optimum(ranks, microbatches, memory_limit=limit)
    assert (found.makespan, found.bound) == (best, best)


def test_it_gives_what_it_has_when_time_is_over():
    costs = Costs(forward=1.0 / 3, input_grad=0.7, weight_grad=0.3, transfer=0.123456789)
    found = optimum((0, 1, 2, 3, 0, 1, 2, 3), 12, costs, memory_limit=6, seconds=0.5)
    check(found.schedule)
    assert found.bound <= found.makespan == simulate(found.schedule, costs).makespan


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(BackendError, match="cannot be imported") as caught:
        optimum(2, 2)
    assert ".[search]" in str(caught.value)


def test_every_schedule_of_the_package_is_at_or_above_the_optimum():
    best = optimum(3, 4).makespan
    for name in ("gpipe", "one_f_one_b", "zero_bubble_h1", "zero_bubble_2p"):
        assert simulate(schedules.by_name(name, ranks=3, microbatches=4)).makespan >= best
