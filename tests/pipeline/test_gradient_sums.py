"""Sums of gradients over replicas by NCCL, in buckets.

NCCL is emulated. With `one queue` the emulated device runs nothing before all that was issued earlier has begun.
"""

import time

import numpy as np
import pytest
from gpu_emulator.fixture import own_gpus
from support import dense
from support.small_gpt import build, text

from mpipipe import Mesh, Pipeline, arrays, nn
from mpipipe.comm.nccl import sums
from mpipipe.comm.transport.staged import StagedTransport
from mpipipe.schedules import from_csv, gpipe

SMALL = dict(layers=3, device="cuda", dtype="float32")
pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(sums, "BUCKET_BYTES", 2000)


@pytest.fixture
def mesh(own, comm):
    """All ranks are replicas of pipelines of one rank."""
    return Mesh(comm, pipe=1, data=comm.size)


def pipeline_of(mesh, schedule, stages, recompute=False):
    loss = nn.softmax_cross_entropy
    return Pipeline(stages, schedule, mesh.pipe, loss=loss, replicas=mesh.replicas, recompute=recompute)


def rows_of(mesh, schedule, rows=4):
    """This rank's share of a batch: each replica has rows of its own."""
    part = slice(rows * mesh.data.rank, rows * (mesh.data.rank + 1))
    return dense.placed(schedule, mesh.pipe.rank, *(each[part] for each in text(mesh.shape.data * rows)))


def gradients(stages):
    return [arrays.download(stage.gradients.flat).tobytes() for stage in stages]


@pytest.mark.long
def test_weights_correct_what_was_summed(mesh):
    """Each replica has a weight of its own."""
    schedule = dense.build("zero_bubble_h1", mesh.pipe.size, 1, 4)

    def weighted(output, target, factor):
        return (*nn.softmax_cross_entropy(output, target, factor), 3.0 + 4 * mesh.data.rank)

    found = {}
    for device in ("cpu", "cuda"):
        stages = build(schedule, mesh.pipe.rank, layers=3, device=device, tied=True)
        with Pipeline(stages, schedule, mesh.pipe, loss=weighted, replicas=mesh.replicas) as pipeline:
            losses = [pipeline.step(*rows_of(mesh, schedule)).loss for _ in range(2)]
        found[device] = [*losses, *(arrays.download(stage.gradients.flat) for stage in stages)]
    for one, other in zip(*found.values()):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_a_gradient_that_no_layer_has_written_counts_as_zero(mesh, monkeypatch):
    """With one micro-batch the memory still holds the gradient of the step before."""
    stage = nn.Stage([nn.Linear(3, 40), nn.Linear(40, 60), nn.Linear(60, 3)], seed=1, device="cuda")
    skipping, x = stage.layers[2], np.ones((4, 3), np.float32)
    with Pipeline([stage], gpipe(1, 1), mesh.pipe, loss=nn.mean_squared_error, replicas=mesh.replicas) as pipeline:
        pipeline.step(x, 0 * x)
        assert arrays.download(stage.gradients["2.weight"]).any()
        given = skipping.backward_input
        monkeypatch.setattr(skipping, "backward", lambda dy, saved: given(dy, saved)[0])
        pipeline.step(x, 0 * x)
    assert not arrays.download(stage.gradients["2.weight"]).any()
    assert arrays.download(stage.gradients["1.weight"]).any()


# -- messages ----------------------------------------------------------------------------------------------------------


CROSSING = """0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,3W1,0I1,0W0,0W1
1F0,2F0,1F1,2F1,2I0,1I0,2I1,2W0,2W1,1I1,1W0,1W1
"""  # gradients cross, each followed by the last weight gradient of a stage


class Slow(nn.Layer):
    """Takes half a second for one input gradient, in which messages go on."""

    def __init__(self, microbatch):
        self.microbatch = microbatch

    def forward(self, x):
        return x, self.stage.position.microbatch

    def backward_input(self, dy, saved):
        end = time.monotonic() + 0.5 * (saved == self.microbatch)
        while time.monotonic() < end:
            self.stage.poll()
            time.sleep(1e-3)
        return dy, None


@pytest.mark.long
@pytest.mark.mpi(min_size=4)
def test_sums_wait_for_messages_that_the_host_moves(comm, subcomm, monkeypatch):
    """Later pieces of a staged message would stand behind a sum, and that waits for the replica that waits for them."""
    four = subcomm(4)
    if four is None:
        return
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "20")
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", "0")
    monkeypatch.setattr(StagedTransport, "piece_bytes", 64)
    x = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    with own_gpus(four.rank, one_queue=True), arrays.own_stream(), Mesh(four, pipe=2, data=2) as mesh:
        schedule = from_csv(CROSSING)
        slow = {(0, 0): (3, 1), (1, 1): (1, 0)}.get((mesh.data.rank, mesh.pipe.rank), (None, None))
        stages = []
        for number in schedule.stages_of(mesh.pipe.rank):
            layers = [nn.Linear(32, 32), Slow(slow[1] if slow[0] == number else None)]
            stages.append(nn.Stage(layers, device="cuda", first=2 * number, seed=1))
        mine = dense.placed(schedule, mesh.pipe.rank, x, -x)
        with Pipeline(stages, schedule, mesh.pipe, loss=nn.mean_squared_error, replicas=mesh.replicas) as pipeline:
            assert pipeline.ranks.sums_by_nccl
            losses = {pipeline.step(*mine).loss for _ in range(2)}
    assert len(losses) == 1
