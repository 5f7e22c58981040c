"""Pipelines whose messages and sums go by NCCL: same bits, nothing through the host, no deadlock whatever the device does.

NCCL is emulated (support/emulator/nccl.py). With `one_queue` the emulated device runs nothing before all that was issued
earlier has begun, which is the most that a GPU may make streams wait for each other.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import dense
from support.emulator.fixture import own_gpus
from support.small_gpt import text

from mpipipe import Mesh, Pipeline, arrays, nn
from mpipipe.attention import Local
from mpipipe.models import GPT
from mpipipe.schedules import gpipe, partition

SMALL = dict(vocab=32, dim=16, layers=3, heads=4, kv_heads=2, hidden=24, seq=12)


@pytest.fixture(params=[False, True], ids=["streams", "one queue"])
def own(request, comm):
    with own_gpus(comm.rank, request.param) as device:
        yield device


def build(schedule, rank, dtype="float32", **sizes):
    model = GPT(**{**SMALL, **sizes})
    layers = model.build(Local(causal=True))
    parts = partition(model.costs(), schedule.stages)
    cuts = [parts[number] for number in schedule.stages_of(rank)]
    return [nn.Stage(layers[start:stop], dtype=dtype, seed=3, first=start, device="cuda") for start, stop in cuts]


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
    """({name: gradient}, loss, bytes of the last step that crossed, and that went by NCCL) of a training."""
    monkeypatch.setenv("MPIPIPE_NCCL", nccl)
    stages = build(schedule, pipe.rank, **options)
    mine = dense.placed(schedule, pipe.rank, *(each[part] for each in text(rows)))
    with Pipeline(stages, schedule, pipe, loss=nn.softmax_cross_entropy, replicas=replicas) as pipeline:
        assert pipeline.engine.nccl.messages == (nccl != "off" and pipe.size * (1 if replicas is None else replicas.size) > 1)
        for _ in range(steps):
            with monkeypatch.context() as patch:
                crossings, before = Crossings(patch), sent(own.machine)
                result = pipeline.step(*mine)
            by_nccl, message_bytes = sent(own.machine) - before, pipeline.bytes_sent
    found = {name: arrays.download(stage.gradients[name]) for stage in stages for name in stage.gradients}
    return found, result.loss, crossings.count, by_nccl, message_bytes


def same_bits(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


SCHEDULES = [("gpipe", 1), ("one_f_one_b", 1), ("interleaved_1f1b", 2), ("zero_bubble_h1", 1), ("zero_bubble_v", 2)]


@pytest.mark.parametrize("name, chunks", SCHEDULES)
def test_messages_by_nccl_give_the_bits_of_staged_ones(own, comm, monkeypatch, name, chunks):
    schedule = dense.build(name, comm.size, chunks, 4)
    expected, loss, *_ = run(own, comm, schedule, monkeypatch, "off")
    found, other, crossed, by_nccl, message_bytes = run(own, comm, schedule, monkeypatch, "auto")
    same_bits(found, expected)
    assert other == loss
    assert by_nccl == message_bytes
    tokens = 6 * SMALL["seq"] * 8
    assert crossed <= tokens + 4 * 8, "inputs or targets, and losses"
    assert own.machine.most_underway == (comm.size > 1), "a send behind another one"
