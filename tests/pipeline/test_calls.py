"""What the machinery of a pipeline costs: calls of Python functions for a micro-batch, the same on every machine."""

from __future__ import annotations

import sys

import numpy as np

from mpipipe import Pipeline, nn, schedules

WIDTH, ROWS, MICROBATCHES = 64, 4, 32
MOST_CALLS = (28, 35)  # on the first and on the last of two ranks
WAITING = {"_wait", "wait_for", "Test"}  # how often they call others depends on the other rank


def waits(frame):
    """Whether a function waits for the other rank, or was called by one that does."""
    while frame is not None:
        if frame.f_code.co_name in WAITING:
            return True
        frame = frame.f_back
    return False


def calls_of_a_step(step):
    calls = 0

    def trace(frame, event, argument):
        nonlocal calls
        calls += event == "call" and not waits(frame)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
    return calls


def test_a_microbatch_takes_few_calls(pair):
    schedule = schedules.one_f_one_b(2, MICROBATCHES)
    stage = nn.Stage([nn.Linear(WIDTH, WIDTH)], first=pair.rank)
    batch = np.ones((ROWS * MICROBATCHES, WIDTH), np.float32)
    inputs, targets = (batch, None) if pair.rank == 0 else (None, batch)
    with Pipeline([stage], schedule, pair, loss=nn.mean_squared_error) as pipeline:
        for _ in range(3):  # shapes are known then, and actions are bound
            pipeline.step(inputs, targets)
        # the fewest of several steps: the rest depends on how long messages take
        fewest = min(calls_of_a_step(lambda: pipeline.step(inputs, targets)) for _ in range(10))
    assert fewest <= (MOST_CALLS[pair.rank] + 0.5) * MICROBATCHES
