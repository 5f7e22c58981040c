"""Pipelines whose messages and sums go by NCCL: same bits, nothing through the host, and no deadlock.

NCCL is emulated (gpu_emulator/nccl.py). With `one_queue` the emulated device runs nothing before all that was
issued earlier has begun, which is the most that a GPU may make streams wait for each other.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from support import dense
from support.device_pipelines import all_aborted
from support.small_gpt import MODEL, build, text

from mpipipe import Mesh, Pipeline, arrays, nn
from mpipipe.errors import BackendError, MismatchError, MpipipeError, PeerError, StageError
from mpipipe.schedules import from_csv, gpipe, one_f_one_b

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


def run(own, pipe, schedule, monkeypatch, nccl, steps=3, rows=6, replicas=None, part=slice(None), **options):
    """({name: gradient}, loss, bytes that crossed, went by NCCL, and had to go to other ranks in the last step)."""
    monkeypatch.setenv("MPIPIPE_NCCL", nccl)
    stages = build(schedule, pipe.rank, **{**SMALL, **options})
    mine = dense.placed(schedule, pipe.rank, *(each[part] for each in text(rows)))
    with Pipeline(stages, schedule, pipe, loss=nn.softmax_cross_entropy, replicas=replicas) as pipeline:
        ranks = pipe.size * (1 if replicas is None else replicas.size)
        assert pipeline.engine.nccl.messages == (nccl != "off" and ranks > 1)
        for _ in range(steps):
            with monkeypatch.context() as patch:
                crossings, before = Crossings(patch), sent(own.machine)
                own.reset()
                result = pipeline.step(*mine)
            by_nccl = sent(own.machine) - before
            needed = pipeline.bytes_sent
            if replicas is not None:
                needed += sum(stage.gradients.flat.nbytes for stage in stages)
    found = {name: arrays.download(stage.gradients[name]) for stage in stages for name in stage.gradients}
    return found, result.loss, crossings.count, by_nccl, needed


def same_bits(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


STREAMS, ONE_QUEUE = False, True


@pytest.mark.long
@pytest.mark.parametrize(
    "own, name, chunks",
    [
        (STREAMS, "zero_bubble_h1", 1), (ONE_QUEUE, "interleaved_1f1b", 2),
    ],
    indirect=["own"],
)  # fmt: skip
def test_graphs_are_recorded_before_messages_go_by_nccl(own, comm, monkeypatch, name, chunks):
    """A recording allocates, for which the host may have to wait for the device, and with it for other ranks."""
    schedule = dense.build(name, comm.size, chunks, 4)
    record, recorded = arrays.record_graph, []
    with arrays.own_stream():
        expected, loss, *_ = run(own, comm, schedule, monkeypatch, "off", rows=4)
        monkeypatch.setenv("MPIPIPE_GRAPHS", "1")
        monkeypatch.setattr(arrays, "record_graph", lambda work: recorded.append(sent(own.machine)) or record(work))
        found, same, _, by_nccl, needed = run(
            own, comm, schedule, monkeypatch, "on" if comm.size > 1 else "auto", rows=4
        )
    assert same == loss
    same_bits(found, expected)
    assert recorded and recorded[-1] == recorded[0]  # bytes sent by then: those that opened the lanes
    assert by_nccl >= needed * (comm.size > 1)
    launched = sum(launch.startswith("graph of") for launch in own.launches)  # in the last step
    assert launched == len(schedule.orders[comm.rank])


SCHEDULES = [("one_f_one_b", 1), ("interleaved_1f1b", 2), ("zero_bubble_h1", 1), ("looped_bfs", 2)]


@pytest.mark.parametrize(
    "own, name, chunks, tied",
    [(ONE_QUEUE, *each, False) for each in SCHEDULES]
    + [(STREAMS, *SCHEDULES[1], False)]
    + [
        pytest.param(*each, True, marks=pytest.mark.long)
        for each in ((STREAMS, *SCHEDULES[0]), (ONE_QUEUE, *SCHEDULES[3]))
    ],
    indirect=["own"],
)
def test_messages_by_nccl_give_the_bits_of_staged_ones(own, comm, monkeypatch, name, chunks, tied):
    """Those of tied parameters, too."""
    schedule = dense.build(name, comm.size, chunks, 4)
    expected, loss, *_ = run(own, comm, schedule, monkeypatch, "off", steps=1, tied=tied)
    found, other, crossed, by_nccl, needed = run(own, comm, schedule, monkeypatch, "auto", tied=tied)
    same_bits(found, expected)
    assert other == loss
    shared = MODEL["vocab"] * MODEL["dim"] * 4 if tied and comm.size > 1 and comm.rank in (0, comm.size - 1) else 0
    assert by_nccl == needed + shared
    tokens = 6 * MODEL["seq"] * 8
    assert crossed <= (2 if comm.size == 1 else 1) * tokens + 4 * 8, "inputs and targets, and losses"


CROSSED = "0F0,0F1,0F2,0B1,0B0,0B2\n1F1,1B1,1F0,1F2,1B0,1B2\n"


@pytest.mark.mpi(min_size=2)
def test_messages_that_are_needed_in_another_order_than_they_are_made(own, subcomm, monkeypatch):
    two = subcomm(2)
    if two is None:
        return
    schedule = from_csv(CROSSED)
    expected, loss, *_ = run(own, two, schedule, monkeypatch, "off", steps=1)
    found, other, *_ = run(own, two, schedule, monkeypatch, "auto")
    same_bits(found, expected)
    assert other == loss


@pytest.mark.long
@pytest.mark.parametrize("own", [ONE_QUEUE], indirect=True)
def test_messages_of_every_call_of_a_pipeline(own, comm, monkeypatch):
    """Calls of other kinds and with other shapes, in any order; only those that have run before go by NCCL."""
    schedule = dense.build("one_f_one_b", comm.size, 1, 4)

    def calls(nccl):
        monkeypatch.setenv("MPIPIPE_NCCL", nccl)
        stages = build(schedule, comm.rank, **{**SMALL, "dtype": "bfloat16"}, dropout=0.25)
        found = []
        with Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy) as pipeline:
            for rows in (6, 5, 6, 4):
                mine = dense.placed(schedule, comm.rank, *text(rows))
                for call in (pipeline.step, pipeline.evaluate, pipeline.step, pipeline.evaluate):
                    result = call(*mine)
                    found.append(result if isinstance(result, float) else result.loss)
                outputs = pipeline.forward(mine[0])
                found.append(None if outputs is None else arrays.download(outputs).tobytes())
        return found

    assert calls("auto") == calls("off")
    assert (sent(own.machine) > comm.size) == (comm.size > 1)


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
    """Two numbers have one sum, whatever the order. Nothing crosses to the host but inputs, targets and losses."""
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
    assert by_nccl == needed if not tied else by_nccl > needed
    assert crossed <= 2 * 2 * MODEL["seq"] * 8 + 2 * 8


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.long)])
def test_replicas_with_graphs_have_the_bits_of_those_without(own, comm, monkeypatch, tied):
    """The last backward of a stage tells of its layers, whose sums start one by one: it runs without a graph."""
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
    assert sum(launch.startswith("graph of") for launch in own.launches) == actions - 1  # in the last step


@pytest.mark.mpi(min_size=4)
def test_sums_of_four_replicas_are_near_those_by_mpi(own, comm, subcomm, monkeypatch):
    four = subcomm(4)
    if four is None:
        return
    with Mesh(four, pipe=1, data=4) as mesh:
        options = dict(replicas=mesh.replicas, part=slice(mesh.data.rank, mesh.data.rank + 1))
        expected, *_ = run(own, mesh.pipe, gpipe(1, 1), monkeypatch, "off", steps=1, **options)
        found, *_ = run(own, mesh.pipe, gpipe(1, 1), monkeypatch, "on", steps=1, **options)
    for name in found:
        largest = np.abs(expected[name]).max()
        assert np.abs(found[name] - expected[name]).max() <= 8 * np.finfo(np.float32).eps * largest, name


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
    sharing = "rank 1" if comm.size == 2 else f"ranks 1-{comm.size - 1}"
    assert f"found: {sharing}: it shares GPU 0000:01:00.0" in text
    assert "with rank 0" in text and "MPIPIPE_NCCL=auto" in text


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("own", [STREAMS], indirect=True)
def test_nccl_on_some_ranks_and_a_demand_of_one_rank_alone_are_refused(own, comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_NCCL", "on" if comm.rank else "auto")
    demand(comm, "MPIPIPE_NCCL", MismatchError)
    monkeypatch.setenv("MPIPIPE_NCCL", "on")
    if comm.rank == 1:
        monkeypatch.setattr(sys.modules["cupy.cuda.nccl"], "available", False)
    text = demand(comm, "rank 1: CuPy does not find libnccl")
    assert text.startswith("rank 1:") and "nvidia-nccl" not in text.splitlines()[0]


@pytest.mark.mpi(min_size=2)
def test_a_demand_without_gpus_is_refused(comm, monkeypatch):
    monkeypatch.setenv("MPIPIPE_NCCL", "on")
    schedule = gpipe(comm.size, 2)
    with pytest.raises(BackendError, match="it computes on the CPU"):
        Pipeline(dense.model(schedule, comm.rank), schedule, comm, loss=dense.mean_squared)


# -- failures ----------------------------------------------------------------------------------------------------------


class Breaking(nn.Stage):
    """A stage whose backward raises once it is told so."""

    broken = False

    def backward(self, dy, saved):
        if self.broken:
            raise ValueError("broken on purpose")
        return super().backward(dy, saved)


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("guilty", ["first", "last"])
def test_a_stage_that_raises_in_mid_step_ends_all_ranks(own, comm, guilty):
    guilty = 0 if guilty == "first" else comm.size - 1
    schedule = one_f_one_b(comm.size, 4)
    stages = build(schedule, comm.rank, kind=Breaking, **SMALL)
    mine = dense.placed(schedule, comm.rank, *text(8))
    pipeline = Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy)
    for _ in range(2):
        pipeline.step(*mine)
    stages[0].broken = comm.rank == guilty
    with pytest.raises(StageError if comm.rank == guilty else PeerError, match="broken on purpose"):
        pipeline.step(*mine)
    all_aborted(own.machine)


@pytest.mark.mpi(min_size=2)
def test_a_replica_that_raises_before_its_sums_ends_all_ranks(own, comm):
    """The kernel of the other replica's sum is under way, and waits for ever."""
    if comm.size % 2:
        pytest.skip("needs an even number of ranks")
    mesh = Mesh(comm, pipe=comm.size // 2, data=2)
    schedule = one_f_one_b(mesh.pipe.size, 2)
    stages = build(schedule, mesh.pipe.rank, kind=Breaking, **SMALL)
    mine = dense.placed(schedule, mesh.pipe.rank, *text(2))
    pipeline = Pipeline(stages, schedule, mesh.pipe, loss=nn.softmax_cross_entropy, replicas=mesh.replicas)
    pipeline.step(*mine)
    stages[0].broken = comm.rank == comm.size - 1
    with pytest.raises(MpipipeError, match="broken on purpose"):
        pipeline.step(*mine)
    all_aborted(own.machine)


@pytest.mark.mpi(min_size=2)
def test_a_failure_that_nccl_notices_ends_all_ranks(own, comm):
    schedule = one_f_one_b(comm.size, 4)
    mine = dense.placed(schedule, comm.rank, *text(8))
    pipeline = Pipeline(build(schedule, comm.rank, **SMALL), schedule, comm, loss=nn.softmax_cross_entropy)
    for _ in range(2):  # whose messages go by MPI
        pipeline.step(*mine)
    if comm.rank == 0:
        own.machine.communicators[0]._failure = 6
    with pytest.raises(MpipipeError, match=r"NCCL reports a failure .*REMOTE_ERROR"):
        pipeline.step(*mine)
