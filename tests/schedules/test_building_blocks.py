"""ZB-2P: no waiting where memory allows, never slower than ZB-H1, and rates for costs of real models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipipe import schedules
from mpipipe.errors import ArgumentError
from mpipipe.schedules import Costs, building_blocks, simulate
from mpipipe.schedules.action import OrdersOnDemand


def waiting_share(schedule, costs, busy):
    """The share of the longest time from a rank's first action to its last in which it waits."""
    longest = max(spans[-1][2] - spans[0][1] for spans in simulate(schedule, costs).spans)
    return (longest - busy) / longest


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_no_rank_waits_where_two_pipelines_full_of_activations_fit(ranks):
    for microbatches in (2 * ranks - 1, 2 * ranks, 4 * ranks):
        for limit in (max(1, 2 * ranks - 1), 2 * ranks, None):
            schedule = schedules.zero_bubble_2p(ranks, microbatches, memory_limit=limit)
            timeline = simulate(schedule)
            assert timeline.makespan == 3 * microbatches + ranks - 1
            assert waiting_share(schedule, Costs(), 3 * microbatches) == 0
            assert max(timeline.peak_activations) <= (limit or 2 * ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_orders_of_h2_are_written_out_where_they_are_the_best(ranks):
    """Otherwise orders are searched: where memory, micro-batches or costs are others."""
    few, many, costs = 2 * ranks - 1, 4 * ranks, Costs(0.1 + 0.2, [0.3] * ranks, 0.3)  # 0.1 + 0.2 is not 0.3

    def written(microbatches, costs, limit=None):
        schedule = schedules.zero_bubble_2p(ranks, microbatches, costs, memory_limit=limit)
        return isinstance(schedule.orders, OrdersOnDemand)

    assert written(many, costs) and written(few, costs, limit=2 * ranks - 1)
    assert not written(many, Costs(0.5, 0.5, 0.6))
    if ranks > 1:
        assert not written(many, Costs(1, 1, 1, 0.1))
        assert not written(few - 1, costs) and not written(many, costs, limit=2 * ranks - 2)


@settings(max_examples=30)
@given(
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 16),
    times=st.tuples(*[st.integers(1, 4)] * 3),
    limit=st.integers(1, 14),
)
def test_the_limit_is_kept_and_with_that_of_h1_it_is_never_slower(ranks, microbatches, times, limit):
    costs = Costs(*times, transfer=0.5)
    timeline = simulate(schedules.zero_bubble_2p(ranks, microbatches, costs, limit), costs)
    assert max(timeline.peak_activations) <= limit
    if limit >= ranks:
        by_hand = schedules.zero_bubble_h1(ranks, microbatches)
        assert timeline.makespan <= simulate(by_hand, costs).makespan + 1e-9


@pytest.mark.parametrize("arguments", [dict(memory_limit=0.5), dict(kept=1.5)])
def test_a_limit_that_no_schedule_keeps_is_refused(arguments):
    with pytest.raises(ArgumentError) as caught:
        schedules.zero_bubble_2p(4, 8, **arguments)
    assert "at least 1" in str(caught.value) or "0 to 1" in str(caught.value)


@pytest.mark.parametrize(("transfer", "tries"), [(0, 1), (0.5, 2)])
def test_of_a_large_schedule_no_second_choice_is_made_where_the_first_is_as_fast_as_any(monkeypatch, transfer, tries):
    """Where messages take time, some rank waits: another choice might be faster."""
    made, fill = [], building_blocks.fill_waits

    def counted(problem, *rest, **options):
        made.append(problem.microbatches)
        return fill(problem, *rest, **options)

    monkeypatch.setattr(building_blocks, "AFFORDABLE", 0)  # every schedule is large
    monkeypatch.setattr(building_blocks, "fill_waits", counted)
    costs = Costs(1, 1, 2, transfer)
    timeline = simulate(schedules.zero_bubble_2p(4, 40, costs), costs)
    assert made.count(40) == tries
    waits = max(end - starts[0] for starts, end in zip(timeline.starts, timeline.ends)) - 4 * 40
    assert (waits == 0) == (tries == 1)
