"""Sums over replicas: exact for what can be exact, in float32 for half types, large buffers, any order of progress."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from mpipipe.comm import allreduce
from mpipipe.job import inprocess
from mpipipe.job.wait import wait_for


def total(comm, flat):
    wait_for(allreduce.AllReduce(comm, flat))
    return flat


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_half_types_are_added_in_float32_and_rounded_once(comm, kind):
    values = [np.array([1.0, 2.0**-7 if rank else 1.0, 300.0], np.float32).astype(kind) for rank in range(comm.size)]
    flat = total(comm, values[comm.rank].copy())
    expected = sum(value.astype(np.float32) for value in values).astype(kind)
    np.testing.assert_array_equal(flat, expected)
    assert flat.dtype == kind


def test_several_buckets_and_sums_at_once(comm, monkeypatch):
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 64_000)
    flats = [np.full(50_001, float(comm.rank + k)) for k in range(3)]
    pending = [allreduce.AllReduce(comm, flat) for flat in flats]
    for sum_ in pending[::-1]:
        wait_for(sum_)
    for k, flat in enumerate(flats):
        np.testing.assert_array_equal(flat, comm.size * (comm.size - 1) / 2 + comm.size * k)


def test_64_megabytes_and_an_empty_buffer(comm):
    flat = total(comm, np.ones(8 << 20))
    assert flat.min() == flat.max() == comm.size
    assert total(comm, np.empty(0)).size == 0


def check_gather(comm):
    edges = np.cumsum([0, *(3000 * rank + 7 for rank in range(comm.size - 1)), 0]).tolist()
    ranges = list(pairwise(edges))  # of different sizes, the last one empty
    expected = np.concatenate([(-1.0) ** rank * np.arange(start, stop) for rank, (start, stop) in enumerate(ranges)])
    flat = np.full(edges[-1], np.nan)
    start, stop = ranges[comm.rank]
    flat[start:stop] = expected[start:stop]
    wait_for(allreduce.AllGather(comm, flat, ranges))
    assert flat.tobytes() == expected.tobytes()


@pytest.mark.parametrize("most", [1 << 30, 1000])
def test_a_gather_leaves_each_range_as_its_rank_has_it(comm, monkeypatch, most):
    monkeypatch.setattr(allreduce, "GATHERED", most)
    check_gather(comm)


def test_so_does_a_gather_of_ranks_that_are_threads():
    inprocess.run(3, check_gather)
