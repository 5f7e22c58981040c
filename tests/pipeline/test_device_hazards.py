"""Buffers that a pipeline on devices uses again while something still reads them, and clocks that run on the device."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from support import dense
from support.received_inputs import check_weight_gradients_from_received_inputs

from mpipipe import Pipeline, analysis, arrays, nn
from mpipipe.comm.transport import gpu_aware
from mpipipe.errors import ArgumentError
from mpipipe.schedules import gpipe, one_f_one_b


@pytest.fixture(params=["direct", "staged"])
def sending(request, gpu, comm, monkeypatch):
    if request.param == "direct" and gpu.real and not gpu_aware.detect(comm).direct:
        pytest.skip("this MPI does not take device memory")
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", "1" if request.param == "direct" else "0")


def test_a_weight_gradient_reads_the_input_that_was_received(gpu, sending, comm):
    check_weight_gradients_from_received_inputs(comm, "cuda")


class Same:
    """Hands on what it gets."""

    device = "cuda"

    def forward(self, x):
        return x, None

    def backward(self, dy, saved):
        return dy


@pytest.mark.parametrize(
    "stage, width",
    [(lambda: nn.Stage([nn.Dropout(0.5)], device="cuda"), 600_000), (Same, 16)],
    ids=["dropout-long", "same-short"],
)
def test_a_received_array_that_is_the_output_is_not_received_into(gpu, sending, comm, monkeypatch, stage, width):
    """More micro-batches than receives posted ahead; the long ones are more than 2 MiB, in two chunks."""
    monkeypatch.setenv("MPIPIPE_SYNC_SENDS", "1")
    schedule = gpipe(comm.size, 6)
    x = np.arange(6, dtype=np.float32)[:, None] + np.zeros(width, np.float32)
    feeds = [arrays.upload(x[m : m + 1] + 100 * call) for call in range(2) for m in range(6)]
    with Pipeline([stage()], schedule, comm) as pipeline:
        outputs = [pipeline.forward(part if comm.rank == 0 else None) for part in (feeds[:6], feeds[6:])]
        if comm.rank == comm.size - 1:  # those of the first call were kept during the second
            values = [arrays.download(y) for part in outputs for y in part]
            assert [set(value.reshape(-1)) for value in values] == [
                {m + 100 * call} for call in range(2) for m in range(6)
            ]


def linear_stage(comm):
    return nn.Stage([nn.Linear(32, 32)], seed=comm.rank, first=comm.rank, device="cuda")


def test_an_evaluation_is_no_part_of_the_durations(gpu, comm):
    schedule = one_f_one_b(comm.size, 3)
    mine = dense.placed(schedule, comm.rank, np.ones((6, 32), np.float32), np.ones((6, 32), np.float32))
    with Pipeline([linear_stage(comm)], schedule, comm, loss=nn.mean_squared_error) as pipeline:
        pipeline.step(*mine)
        before = pipeline.durations()
        pipeline.evaluate(*mine)
        pipeline.forward(mine[0])
        assert pipeline.durations() == before


def test_spans_of_one_rank_follow_each_other_on_the_device(gpu, comm):
    schedule = one_f_one_b(comm.size, 4)
    mine = dense.placed(schedule, comm.rank, np.ones((8, 32), np.float32), np.ones((8, 32), np.float32))
    with Pipeline([linear_stage(comm)], schedule, comm, loss=nn.mean_squared_error) as pipeline:
        with analysis.recording(pipeline) as record:
            for _ in range(2):
                pipeline.step(*mine)
    spans = record.spans
    assert [span.name for span in spans] == [str(action) for action in schedule.orders[comm.rank]] * 2
    resolution = 2e-6  # of an event
    for earlier, later in pairwise(spans[:8]):
        assert earlier.start < later.start and earlier.end <= later.start + resolution


def test_an_input_on_the_device_that_is_not_contiguous_is_refused(gpu):
    stage = nn.Stage([nn.Linear(4, 4)], device="cuda")
    x = arrays.upload(np.ones((4, 4), np.float32))
    stage.forward(x[:2])
    for strided in (x.T, x[:, :2], x[::2]):
        with pytest.raises(ArgumentError, match="not contiguous"):
            stage.forward(strided)
