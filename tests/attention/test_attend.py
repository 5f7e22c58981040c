"""What a user hands to SelfAttention: an object of their own, with forward and backward and perhaps more."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe import attention, nn
from mpipipe.comm import inprocess
from mpipipe.errors import ArgumentError
from mpipipe.nn.layers.attend import Attend, AttendAdapter, as_attend


class Bare:
    """The least that works."""

    def __init__(self):
        self.inner = attention.Local()
        self.forward, self.backward = self.inner.forward, self.inner.backward


class Positioned(Bare):
    def positions(self, rows):
        return 3 + 2 * np.arange(rows)


class Polled(Bare):
    poll = None


def through(attend, poll=None, positions=None):
    stage = nn.Stage([nn.SelfAttention(8, 2, attend=attend, positions=positions)], dtype="float64")
    stage.poll = poll
    x, dy = np.random.default_rng(0).normal(size=(2, 1, 5, 8))
    y, saved = stage.forward(x)
    return y, stage.backward(dy, saved)


def same(found, expected):
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


def test_forward_and_backward_are_enough():
    same(through(Bare()), through(attention.Local()))


def test_positions_are_asked_for_if_there_are_any():
    found, plain = through(Positioned()), through(Bare())
    same(found, through(attention.Local(), positions=[3, 5, 7, 9, 11]))
    assert (found[0] != plain[0]).any()


def test_poll_is_shared_with_an_object_that_polls():
    def poll():
        pass

    for attend in (Polled(), attention.Local()):
        through(attend)
        assert attend.poll is not poll
        through(attend, poll)
        assert attend.poll is poll
    bare = Bare()
    through(bare, poll)
    assert "poll" not in vars(bare)


@pytest.mark.parametrize(
    "make", [attention.Local, lambda: attention.KVCache(4), lambda: inprocess.run(1, attention.Ring)[0]]
)
def test_our_own_need_no_adapter(make):
    attend = make()
    assert as_attend(attend) is attend and isinstance(attend, Attend)
    assert isinstance(as_attend(Bare()), AttendAdapter)


def test_a_cache_has_no_backward():
    cache = attention.Cached(4)
    x = np.ones((1, 2, 2, 4))
    out, saved = cache.forward(x, x, x)
    with pytest.raises(ArgumentError, match="no backward"):
        cache.backward(out, saved)
