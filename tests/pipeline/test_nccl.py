"""Pipelines whose sums over replicas go by NCCL: same bits, nothing of them through the host, and no deadlock.

NCCL is emulated (gpu_emulator/nccl.py). With `one_queue` the emulated device runs nothing before all that was
issued earlier has begun, which is the most that a GPU may make streams wait for each other.
"""

import sys

import pytest
from support import dense
from support.small_gpt import MODEL, build, text

from mpipipe import Mesh, Pipeline, arrays, nn
from mpipipe.errors import BackendError, MismatchError, MpipipeError
from mpipipe.schedules import gpipe, one_f_one_b

SMALL = dict(layers=3, device="cuda", dtype="float32")


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


def run(own, pipe, schedule, monkeypatch, nccl, replicas, part, steps=3, **options):
    """({name: gradient}, loss, bytes that crossed, and that went by NCCL, in the last step, bytes of the gradients)."""
    monkeypatch.setenv("MPIPIPE_NCCL", nccl)
    stages = build(schedule, pipe.rank, **{**SMALL, **options})
    mine = dense.placed(schedule, pipe.rank, *(each[part] for each in text(6)))
    with Pipeline(stages, schedule, pipe, loss=nn.softmax_cross_entropy, replicas=replicas) as pipeline:
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
@pytest.mark.mpi(min_size=2)
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
        part = slice(2 * mesh.data.rank, 2 * mesh.data.rank + 2)
        options = dict(replicas=mesh.replicas, part=part, dtype=dtype, tied=tied)
        expected, loss, *_ = run(own, mesh.pipe, schedule, monkeypatch, "off", steps=1, **options)
        found, other, crossed, by_nccl, needed = run(own, mesh.pipe, schedule, monkeypatch, "auto", **options)
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
        part = slice(3 * mesh.data.rank, 3 * mesh.data.rank + 3)
        options = dict(replicas=mesh.replicas, part=part, tied=tied)
        expected, loss, *_ = run(own, mesh.pipe, schedule, monkeypatch, "off", **options)
        monkeypatch.setenv("MPIPIPE_GRAPHS", "1")
        found, other, *_ = run(own, mesh.pipe, schedule, monkeypatch, "on", **options)
        actions = len(schedule.orders[mesh.pipe.rank])
    assert other == loss
    same_bits(found, expected)
    launched = sum(launch.startswith("graph of") for launch in own.launches)  # in the last step
    assert launched == actions


# -- choice ------------------------------------------------------------------------------------------------------------


def demand(comm, match, kind=BackendError):
    """Building a pipeline raises the same error on every rank, and one rank is left to report it."""
    schedule = gpipe(comm.size, 2)
    with pytest.raises(kind, match=match) as caught:
        Pipeline(build(schedule, comm.rank, **SMALL), schedule, comm, loss=nn.softmax_cross_entropy)
    assert comm.allgather(caught.value.reported_elsewhere).count(False) == 1
    return str(caught.value)


@pytest.mark.mpi(min_size=2)
def test_two_ranks_on_one_gpu_are_refused(emulated_gpu, comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_NCCL", "on")
    text = demand(comm, "MPIPIPE_NCCL=on")
    assert text.startswith("rank 1:") and "found: it shares GPU 0000:01:00.0" in text
    assert "with rank 0" in text and "MPIPIPE_NCCL=auto" in text


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("own", [STREAMS], indirect=True)
def test_nccl_on_some_ranks_and_a_demand_of_one_rank_alone_are_refused(own, comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_NCCL", "on" if comm.rank else "auto")
    demand(comm, "MPIPIPE_NCCL", MismatchError)
    monkeypatch.setenv("MPIPIPE_NCCL", "on")
    if comm.rank == 1:
        monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "available", False)
    text = demand(comm, "CuPy does not find libnccl")
    assert text.startswith("rank 1:") and "nvidia-nccl" not in text.splitlines()[0]


@pytest.mark.mpi(min_size=2)
def test_a_demand_without_gpus_is_refused(comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_NCCL", "on")
    schedule = gpipe(comm.size, 2)
    with pytest.raises(BackendError, match="it computes on the CPU"):
        Pipeline(dense.model(schedule, comm.rank), schedule, comm, loss=dense.mean_squared)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_a_failure_that_nccl_notices_ends_all_ranks(own, comm):
    mesh = Mesh(comm, pipe=1, data=comm.size)
    schedule = one_f_one_b(1, 4)
    pipeline = Pipeline(
        build(schedule, 0, **SMALL), schedule, mesh.pipe, loss=nn.softmax_cross_entropy, replicas=mesh.replicas
    )
    mine = text(8)
    pipeline.step(*mine)
    if comm.rank == 0:
        own.machine.communicators[0]._failure = 6
    with pytest.raises(MpipipeError, match=r"NCCL reports a failure .*REMOTE_ERROR"):
        pipeline.step(*mine)
