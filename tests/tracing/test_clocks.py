"""Clocks that differ: records come onto one clock, and no message arrives before it was sent."""

import time

import pytest
from support.made_records import made

from mpipipe import schedules
from mpipipe.job import inprocess
from mpipipe.job.group import group_of
from mpipipe.tracing import Trace
from mpipipe.tracing.recording import clock_offset, collect

SKEW, DRIFT = 0.050, 100e-6  # of rank r: r times as much


def skewed(rank):
    """The clock of a rank, as a function of the true time."""
    return lambda true: true * (1 + rank * DRIFT) + rank * SKEW


def even(action, step):
    return 0.002


def test_skewed_clocks_give_the_times_of_true_ones():
    schedule = schedules.one_f_one_b(4, 8)
    causes = dict(latency={1: 0.001}, late={2: 0.003}, optimizer=0.001, steps=3)
    true = Trace(schedule, made(schedule, even, **causes))
    found = Trace(schedule, made(schedule, even, **causes, clock=skewed))
    for one, other in zip(true.records, found.records):
        for step, same in zip(one.steps, other.steps):
            assert same.end == pytest.approx(step.end, abs=1e-9)
            assert same.received() == pytest.approx(step.received(), abs=1e-9)
    for rank, parts in true.parts().items():
        assert found.parts()[rank] == pytest.approx(parts, abs=1e-8)


def comparison(comm):
    clock = skewed(comm.rank)
    group = group_of(comm)
    private = group.split(0, group.rank, "test")
    offset = clock_offset(group, private, lambda: clock(time.perf_counter()))
    texts = collect(group, "x" * 1000 * comm.rank)
    group.agree("test: the end")
    private.Free()
    true = (offset.at - comm.rank * SKEW) / (1 + comm.rank * DRIFT) - offset.at  # the clock of rank 0 less this one
    return abs(offset.ahead - true), offset.error, texts


def test_offsets_are_found_within_the_error_that_is_told():
    """However long messages take, and on a busy machine, too."""
    for rank, (wrong, error, texts) in enumerate(inprocess.run(3, comparison)):
        assert wrong <= error * (1 + 1e-3) + 1e-9
        assert (error == 0) == (rank == 0)
        assert texts == (["x" * 1000 * peer for peer in range(3)] if rank == 0 else None)
