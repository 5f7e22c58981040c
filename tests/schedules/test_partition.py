"""Partitions against exhaustive search."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.errors import ArgumentError
from mpipipe.schedules import looped_bfs, partition


def sizes(parts):
    return [stop - start for start, stop in parts]


def best_of_all(costs, stages):
    """The best cut by looking at every one: bottleneck, then squares of costs, of sizes, then longer stages first."""

    def badness(cuts):
        parts = list(zip((0, *cuts), (*cuts, len(costs))))
        loads = [sum(map(Fraction, costs[start:stop])) for start, stop in parts]
        lengths = sizes(parts)
        squares = sum(load**2 for load in loads), sum(length**2 for length in lengths)
        return (max(loads), *squares, [-length for length in lengths]), parts

    return min(map(badness, combinations(range(1, len(costs)), stages - 1)))[1]


@pytest.mark.parametrize(
    "costs, stages, expected",
    [
        ([1] * 24, 2, [12, 12]),
        ([1] * 24, 4, [6, 6, 6, 6]),
        ([1] * 10, 3, [4, 3, 3]),
        ([0.1] * 10, 3, [4, 3, 3]),
        ([0] * 10, 3, [4, 3, 3]),
        ([100] * 4 + [400], 2, [4, 1]),
        ([1, 1, 1, 9], 2, [3, 1]),
        ([1, 5, 2, 3], 3, [1, 1, 2]),  # 6, 2, 3 is more even and slower
        ([5], 1, [1]),
        ([3, 1, 1, 1, 1, 1, 3], 3, [2, 3, 2]),
    ],
)
def test_known_partitions(costs, stages, expected):
    assert sizes(partition(costs, stages)) == expected


@given(layers=st.integers(1, 60), stages=st.integers(1, 60))
def test_equal_layers_differ_by_one_with_the_longer_stages_first(layers, stages):
    if layers < stages:
        with pytest.raises(ArgumentError):
            partition([1.5] * layers, stages)
        return
    parts = partition([1.5] * layers, stages)
    size, longer = divmod(layers, stages)
    assert sizes(parts) == [size + 1] * longer + [size] * (stages - longer)
    assert [layer for start, stop in parts for layer in range(start, stop)] == list(range(layers))


cost = st.integers(0, 9) | st.floats(0, 10, allow_nan=False) | st.fractions(0, 10, max_denominator=9)


@given(costs=st.lists(cost, min_size=1, max_size=9), data=st.data())
def test_no_other_cut_is_better(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    assert partition(costs, stages) == best_of_all(costs, stages)


def test_heavy_ends_as_of_an_embedding_and_a_head_are_honoured():
    assert sizes(partition([4] + [1] * 8 + [4], 4)) == [1, 4, 4, 1]


def test_stages_of_a_looped_schedule_give_each_rank_its_chunks():
    parts = partition([1] * 16, 4)
    schedule = looped_bfs(2, 2, 1)
    layers = [[list(range(*parts[stage])) for stage in schedule.stages_of(rank)] for rank in range(2)]
    assert layers == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]]


@pytest.mark.parametrize(
    "costs, stages",
    [
        ([1, 2], 0),
        ([1, 2], 3),
        ([], 1),
        ([1, -1], 1),
        ([1, math.nan], 1),
        ([1, math.inf], 2),
        ([1, "x"], 2),
        ([1, None], 2),
        ([1, 2], 1.5),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_expected(costs, stages):
    with pytest.raises(ArgumentError) as refusal:
        partition(costs, stages)
    assert refusal.value.found and refusal.value.expected
