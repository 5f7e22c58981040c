"""Learned positions: which row is added where, on one rank and over a cache, and their gradients."""

import numpy as np
import pytest
from support.gradcheck import check_stage
from support.tolerance import close, largest

from mpipipe import nn
from mpipipe.attention import KVCache, Local
from mpipipe.errors import ArgumentError
from mpipipe.pipeline.graphs import unrecordable

RANDOM = np.random.default_rng(9)


def made(*arguments, **options):
    return nn.Stage([nn.LearnedPositions(9, 4, *arguments, **options)], dtype="float64")


@pytest.mark.parametrize("attend", [None, Local()])
@pytest.mark.parametrize("positions", [None, [8, 0, 3]])
def test_each_place_gets_the_row_of_its_position(attend, positions):
    stage, x = made(attend, positions), RANDOM.standard_normal((2, 3, 4))
    rows = stage.parameters["0.weight"][positions or [0, 1, 2]]
    np.testing.assert_array_equal(stage.forward(x)[0], x + rows)


def test_gradients_agree_with_finite_differences():
    check_stage(made(positions=[8, 0, 3]), RANDOM.standard_normal((2, 3, 4)))
    stage, x = made(), RANDOM.standard_normal((2, 3, 4))
    stage.backward(x, stage.forward(x)[1])
    np.testing.assert_array_equal(stage.gradients["0.weight"][3:], 0)
    close(stage.gradients["0.weight"][:3], x.sum(0), 2, largest(x))


def test_positions_go_on_with_a_cache():
    stage, x = made(KVCache(9)), RANDOM.standard_normal((1, 9, 4))
    parts = [stage.forward(x[:, a:b])[0] for a, b in ((0, 5), (5, 6), (6, 9))]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), made().forward(x)[0])


def test_given_positions_are_not_asked_for():
    cache = KVCache(9)
    made(cache, positions=[4, 5]).forward(np.zeros((1, 2, 4)))
    assert cache.length == 0


@pytest.mark.parametrize("positions, rows", [([0, 9], 2), ([-1, 0], 2), (None, 10)])
def test_a_position_without_a_row_is_named(positions, rows):
    with pytest.raises(ArgumentError, match=r"layer 0 .LearnedPositions.*no row") as caught:
        made(positions=positions).forward(np.zeros((1, rows, 4)))
    assert caught.value.expected == "0 ... 8" and "max_positions" in caught.value.remedy


def test_graphs_may_record_it_unless_positions_move():
    assert not unrecordable(made()) and not unrecordable(made(Local()))
    assert not unrecordable(made(KVCache(9), positions=[1]))
    assert "KVCache" in unrecordable(made(KVCache(9)))
