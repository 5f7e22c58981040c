"""What the flight recorder tells of a pipeline, while a step runs and after it."""

from __future__ import annotations

import numpy as np
import pytest
from support import dense

from mpipipe import Pipeline, nn, schedules
from mpipipe.errors import StageError
from mpipipe.job import inprocess
from mpipipe.job.flight import Message

WIDTH, ROWS = 8, 4


def accounts_of(comm, device="cpu"):
    """This rank's account in the forward of micro-batch 1 of the second step, and after that step."""
    stage = nn.Stage([nn.Linear(WIDTH, WIDTH)], first=comm.rank, device=device)
    schedule = schedules.one_f_one_b(comm.size, 2)
    forward, found = stage.forward, []
    mine = dense.placed(schedule, comm.rank, *np.ones((2, 2 * ROWS, WIDTH), np.float32))
    with Pipeline([stage], schedule, comm, nn.mean_squared_error) as pipeline:

        def look(x):
            found.append(pipeline.engine.flight.snapshot())
            return forward(x)

        stage.forward = look
        for _ in range(2):
            pipeline.step(*mine)
        found.append(pipeline.engine.flight.snapshot())
    return found[3], found[4]


def check(rank, during, after):
    assert (during.stage, during.microbatch, during.computes) == (rank, 1, True)
    assert during.doing == f"forward of stage {rank}, micro-batch 1, in step (call 2) of pipeline 1 (one_f_one_b)"
    sent = during.sent[0]
    if rank == 0:
        assert sent == Message((1, 0, 0), "the activation of micro-batch 0 over edge 1", 1, (0, 1), 4 * ROWS * WIDTH)
    else:
        assert sent == Message((1, 0, 1), "the gradient of micro-batch 0 over edge 1", 0, (0, 3), 4 * ROWS * WIDTH)
    assert (len(during.sent), during.skipped, during.expects) == (1, (), None)
    assert (after.doing, after.sent, after.skipped) == ("", (), ())
    assert after.key == during.key
    lines = [line.split(":")[0].strip() for line in after.operations]
    expected = ["0F0", "0F1", "0B0", "0B1"] if rank == 0 else ["1F0", "1B0", "1F1", "1B1"]
    assert lines == ["step (call 1) of pipeline 1 (one_f_one_b)", *expected, lines[0].replace("1", "2", 1), *expected]


def test_an_account_names_the_action_and_what_was_sent():
    found = inprocess.run(2, accounts_of)
    for rank, (during, after) in enumerate(found):
        check(rank, during, after)
    assert found[0][0].key == found[1][0].key
    line = found[0][1].operations[1]
    assert line.startswith("  0F0: done ") and line.endswith(" s ago; sent to rank 1 (channel 0, tag 1, 128 bytes)")


def test_a_device_has_the_same_account_without_times(gpu):
    found = inprocess.run(2, lambda comm: accounts_of(comm, "cuda"))
    for rank, (during, after) in enumerate(found):
        check(rank, during, after)
    assert found[0][1].operations[1] == "  0F0: done; sent to rank 1 (channel 0, tag 1, 128 bytes)"


def test_a_pipeline_that_failed_is_in_no_action():
    def job(comm):
        stage = nn.Stage([nn.Linear(WIDTH, WIDTH)], first=comm.rank)
        pipeline = Pipeline([stage], schedules.one_f_one_b(comm.size, 2), comm, nn.mean_squared_error)
        stage.forward = None
        x = np.ones((2 * ROWS, WIDTH), np.float32)
        with pytest.raises(StageError):
            pipeline.step(x, x)
        return pipeline.engine.flight.snapshot()

    (account,) = inprocess.run(1, job)
    assert (account.doing, account.computes) == ("", False)
