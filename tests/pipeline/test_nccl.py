"""Pipelines whose sums over replicas go by NCCL, in small buckets: same bits, nothing through the host, no deadlock.

NCCL is emulated (gpu_emulator/nccl.py). With `one_queue` the emulated device runs nothing before all that was
issued earlier has begun, which is the most that a GPU may make streams wait for each other.
"""

import sys
import time

import numpy as np
import pytest
from gpu_emulator.fixture import own_gpus
from support import dense
from support.dense import near
from support.rings import refused
from support.small_gpt import MODEL, build, text

from mpipipe import Mesh, Pipeline, arrays, nn
from mpipipe.comm.nccl import sums
from mpipipe.comm.transport.staged import StagedTransport
from mpipipe.errors import BackendError, MismatchError, MpipipeError
from mpipipe.schedules import from_csv, gpipe, one_f_one_b

SMALL = dict(layers=3, device="cuda", dtype="float32")
pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(sums, "BUCKET_BYTES", 2000)


class Crossings:
    """Counts the bytes that cross between host and device."""

    def __init__(self, monkeypatch):
        runtime = arrays.cupy().cuda.runtime
        self.count, copy = 0, runtime.memcpyAsync

        def counted(dst, src, size, kind, stream):
            self.count += size if kind in (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost) else 0
            copy(dst, src, size, kind, stream)

        monkeypatch.setattr(runtime, "memcpyAsync", counted)


def sent(machine):
    """Bytes that this rank has handed to NCCL."""
    return sum(each._bytes for each in machine.communicators)


def run(own, mesh, schedule, monkeypatch, nccl, rows, steps=3, loss=nn.softmax_cross_entropy, **options):
    """({name: gradient}, loss, bytes that crossed, and that went by NCCL, in the last step, bytes of the gradients)."""
    monkeypatch.setenv("MPIPIPE_NCCL", nccl)
    stages = build(schedule, mesh.pipe.rank, **{**SMALL, **options})
    part = slice(rows * mesh.data.rank, rows * (mesh.data.rank + 1))
    mine = dense.placed(schedule, mesh.pipe.rank, *(each[part] for each in text(rows * mesh.shape.data)))
    with Pipeline(stages, schedule, mesh.pipe, loss=loss, replicas=mesh.replicas) as pipeline:
        assert pipeline.ranks.sums_by_nccl == (nccl != "off")
        for _ in range(steps):
            with monkeypatch.context() as patch:
                crossings, before = Crossings(patch), sent(own.machine)
                own.reset()
                result = pipeline.step(*mine)
            by_nccl = sent(own.machine) - before
    needed = sum(stage.gradients.flat.nbytes for stage in stages)
    found = {name: arrays.download(stage.gradients[name]) for stage in stages for name in stage.gradients}
    return found, result.loss, crossings.count, by_nccl, needed


def same_bits(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


STREAMS, ONE_QUEUE = False, True


@pytest.mark.long
@pytest.mark.parametrize(
    "own, dtype, tied",
    [
        (STREAMS, "float64", True),
        (STREAMS, "bfloat16", False),
        (ONE_QUEUE, "float64", False),
        (ONE_QUEUE, "bfloat16", True),
    ],
    indirect=["own"],
)
def test_sums_of_two_replicas_have_the_bits_of_those_by_mpi(own, comm, monkeypatch, dtype, tied):
    """Two numbers have one sum, whatever the order.

    Nothing crosses to the host but inputs, targets and losses, and the messages of several ranks.
    """
    if comm.size % 2:
        pytest.skip("needs an even number of ranks")
    with Mesh(comm, pipe=comm.size // 2, data=2) as mesh:
        schedule = gpipe(mesh.pipe.size, 2)
        options = dict(rows=2, dtype=dtype, tied=tied)
        expected, loss, *_ = run(own, mesh, schedule, monkeypatch, "off", steps=1, **options)
        found, other, crossed, by_nccl, needed = run(own, mesh, schedule, monkeypatch, "auto", **options)
    same_bits(found, expected)
    assert other == loss
    if tied and comm.size == 2:  # the shared part is summed apart from what the stages show
        assert by_nccl > needed
    else:
        assert by_nccl == needed
    assert comm.size > 2 or crossed <= 2 * 2 * MODEL["seq_len"] * 8 + 2 * 8


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_replicas_with_graphs_have_the_bits_of_those_without(own, comm, monkeypatch, tied):
    if comm.size % 2:
        pytest.skip("needs an even number of ranks")
    with Mesh(comm, pipe=comm.size // 2, data=2) as mesh, arrays.own_stream():
        schedule = one_f_one_b(mesh.pipe.size, 3)
        options = dict(rows=3, tied=tied)
        expected, loss, *_ = run(own, mesh, schedule, monkeypatch, "off", **options)
        monkeypatch.setenv("MPIPIPE_GRAPHS", "1")
        found, other, *_ = run(own, mesh, schedule, monkeypatch, "on", **options)
        actions = len(schedule.orders[mesh.pipe.rank])
    assert other == loss
    same_bits(found, expected)
    launched = sum(launch.startswith("graph of") for launch in own.launches)  # in the last step
    assert launched == actions


@pytest.mark.long
def test_weights_correct_what_was_summed(own, comm, monkeypatch):
    """Each replica has a weight of its own; the host computes the same."""
    with Mesh(comm, pipe=1, data=comm.size) as mesh:

        def weighted(output, target, factor):
            return (*nn.softmax_cross_entropy(output, target, factor), 3.0 + 4 * mesh.data.rank)

        schedule = dense.build("zero_bubble_h1", 1, 1, 4)
        options = dict(rows=4, loss=weighted, steps=2, dtype="float64", tied=True)
        expected, loss, *_ = run(own, mesh, schedule, monkeypatch, "off", device="cpu", **options)
        found, other, *_ = run(own, mesh, schedule, monkeypatch, "auto", **options)
    assert abs(other - loss) <= 1e-12
    for name, gradient in expected.items():
        near(found[name], gradient, name)


def test_a_gradient_that_no_layer_has_written_counts_as_zero(own, comm, monkeypatch):
    """With one micro-batch the memory still holds the gradient of the step before."""
    mesh = Mesh(comm, pipe=1, data=comm.size)
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


# -- choice ------------------------------------------------------------------------------------------------------------


def demand(comm, match, kind=BackendError):
    schedule = gpipe(comm.size, 2)
    stages = build(schedule, comm.rank, **SMALL)
    return refused(comm, kind, match, lambda: Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy))


def test_two_ranks_on_one_gpu_are_refused(emulated_gpu, comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_NCCL", "on")
    text = demand(comm, "MPIPIPE_NCCL=on")
    assert text.startswith("rank 1:") and "found: it shares GPU 0000:01:00.0" in text
    assert "with rank 0" in text and "MPIPIPE_NCCL=auto" in text


@pytest.mark.parametrize("own", [STREAMS], indirect=True)
def test_nccl_on_some_ranks_and_a_demand_of_one_rank_alone_are_refused(own, comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_NCCL", "on" if comm.rank else "auto")
    demand(comm, "MPIPIPE_NCCL", MismatchError)
    monkeypatch.setenv("MPIPIPE_NCCL", "on")
    if comm.rank == 1:
        monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "available", False)
    text = demand(comm, "CuPy does not find libnccl")
    assert text.startswith("rank 1:") and "nvidia-nccl" not in text.splitlines()[0]


def test_a_demand_without_gpus_is_refused(comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_NCCL", "on")
    schedule = gpipe(comm.size, 2)
    with pytest.raises(BackendError, match="it computes on the CPU"):
        Pipeline(dense.model(schedule, comm.rank), schedule, comm, loss=dense.mean_squared)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failure_that_nccl_notices_ends_all_ranks(own, comm):
    mesh = Mesh(comm, pipe=1, data=comm.size)
    schedule = one_f_one_b(1, 4)
    stages, mine = build(schedule, 0, **SMALL), text(8)
    pipeline = Pipeline(stages, schedule, mesh.pipe, loss=nn.softmax_cross_entropy, replicas=mesh.replicas)
    pipeline.step(*mine)
    if comm.rank == 0:
        own.machine.communicators[0]._failure = 6
    with pytest.raises(MpipipeError, match=r"NCCL reports a failure .*REMOTE_ERROR"):
        pipeline.step(*mine)
