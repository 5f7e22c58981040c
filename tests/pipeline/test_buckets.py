"""Buckets of gradients: every element once, in the order in which layers end, cut at the edges of layers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from mpipipe.pipeline.gradient_sums import Bucket, cut


def test_a_layer_that_fills_a_bucket_has_one_of_its_own():
    layers = [(60, 0), (150, 1), (240, 2), (330, 3)]
    assert cut([layers], 100) == [
        Bucket(0, 240, 330, 3),
        Bucket(0, 150, 240, 2),
        Bucket(0, 60, 150, 1),
        Bucket(0, 0, 60, 0),
    ]


def test_small_layers_share_a_bucket_and_large_ones_have_several():
    layers = [(1000, 0), (1010, 1), (1020, 2), (1250, 3)]
    assert cut([layers], 100) == [
        Bucket(0, 1150, 1250, 3),
        Bucket(0, 1050, 1150, 3),
        Bucket(0, 1000, 1050, 1),
        *(Bucket(0, start, start + 100, 0) for start in range(900, -1, -100)),
    ]


def test_what_holds_pieces_of_all_layers_stands_apart():
    """Matrices, then gains; and a part of a tied parameter, to which the last layer writes."""
    flat, part = [(40, 0), (80, 1), (120, 2), (121, 0), (122, 1), (123, 2)], [(30, 2)]
    found = cut([flat, part], 40)
    assert found == [
        Bucket(0, 80, 120, 2),
        Bucket(1, 0, 30, 2),
        Bucket(0, 40, 80, 1),
        Bucket(0, 120, 123, 0),
        Bucket(0, 0, 40, 0),
    ]


def test_nothing_is_no_bucket():
    assert cut([[]], 10) == []


PIECES = some.lists(some.tuples(some.integers(1, 50), some.integers(0, 5)), max_size=20)


@given(some.lists(PIECES, max_size=3), some.integers(1, 60))
def test_buckets_hold_every_element_once_and_wait_for_all_its_writers(arrays, count):
    given, writers = [], []
    for pieces in arrays:
        writers.append([place for size, place in pieces for _ in range(size)])
        stops = [sum(size for size, _ in pieces[: at + 1]) for at in range(len(pieces))]
        given.append([(stop, place) for stop, (_, place) in zip(stops, pieces)])
    found = cut(given, count)
    covered = sorted((bucket.array, at) for bucket in found for at in range(bucket.start, bucket.stop))
    assert covered == [(array, at) for array, places in enumerate(writers) for at in range(len(places))]
    for bucket in found:
        assert 0 < bucket.stop - bucket.start <= count
        assert bucket.place == min(writers[bucket.array][bucket.start : bucket.stop])
    places = [bucket.place for bucket in found]
    assert places == sorted(places, reverse=True)
