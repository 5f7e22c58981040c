"""What a user hands to SelfAttention: an object of their own, with forward and backward and perhaps more."""

import numpy as np
import pytest

from mpipipe import attention, nn
from mpipipe.errors import ArgumentError, MismatchError
from mpipipe.job import inprocess
from mpipipe.nn.layers.attend import as_attend


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


def test_forward_and_backward_are_enough_and_positions_are_asked_for_if_there_are_any():
    found, plain = through(Positioned()), through(Bare())
    same(plain, through(attention.Local()))
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


def test_a_cache_has_no_backward():
    cache = attention.KVCache(4)
    x = np.ones((1, 2, 2, 4))
    out, saved = cache.forward(x, x, x)
    with pytest.raises(ArgumentError, match="no backward"):
        cache.backward(out, saved)


@pytest.mark.parametrize("ranks", [None, 2])
def test_another_window_is_made_once_and_keeps_all_else(ranks):
    """Alone, and in a ring by all its ranks."""
    whole = np.random.default_rng(1).normal(size=(4, 1, 12, 2, 8))
    cut = attention.Layout("striped", ranks or 1, 12)

    def on_each_rank(comm):
        q, k, v, dout = (cut.shard(x, comm.rank) for x in whole)

        def made(**options):
            options = dict(scale=0.5, segments=[5, 7], **options)
            return attention.Ring(comm, layout="striped", **options) if ranks else attention.Local(**options)

        def through(attend):
            out, saved = attend.forward(q, k, v)
            return out, *attend.backward(dout, saved)

        plain = made()
        before = through(plain)  # it may remember what it planned for this length
        other = plain.with_window(3)
        assert other is plain.with_window(3) and other is not plain and other is not plain.with_window(4)
        assert (plain.window, other.window) == (None, 3)
        same(through(other), through(made(window=3)))
        same(through(plain), before)
        assert plain.bytes_sent == 2 * other.bytes_sent and (plain.bytes_sent > 0) == bool(ranks)  # each counts its own
        if ranks:
            with pytest.raises(MismatchError, match="differ in window"):
                plain.with_window(5 + comm.rank)

    inprocess.run(ranks or 1, on_each_rank)
    for window, refused in ((0, attention.Local()), (3, attention.Local(causal=False))):
        with pytest.raises(ArgumentError, match="window"):
            refused.with_window(window)


def test_users_objects_have_windows_and_count_rows_if_they_can():
    class Windowed(Bare):
        window, rows = None, 0

        def with_window(self, window):
            other = Windowed()
            other.window = window
            return other

        def advance(self, rows):
            self.rows += rows

    mine = Windowed()
    adapter = as_attend(mine)
    assert adapter.with_window(5).inner.window == 5
    adapter.advance(3)
    assert mine.rows == 3
    with pytest.raises(ArgumentError, match="Bare"):
        as_attend(Bare()).with_window(5)
    as_attend(Bare()).advance(3)  # nobody counts


def test_positions_of_a_cache_go_on_without_keys_up_to_its_capacity():
    cache = attention.KVCache(4)
    cache.advance(3)
    assert cache.positions(1).tolist() == [3]
    with pytest.raises(ArgumentError, match="capacity"):
        cache.advance(2)
    assert cache.length == 3
    cache.clear()
    assert cache.positions(2).tolist() == [0, 1]
