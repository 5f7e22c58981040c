"""Trainings whose stages are on a GPU: they take the same steps as on the host, and leave the same kind of weights."""

import math
from pathlib import Path

import numpy as np
import pytest
from gpu_emulator.fixture import own_gpus
from support.small_training import MODEL, config_fixture, metrics
from support.tolerance import close_norm
from support.training_tolerance import close_curves, roundings

from mpipipe import arrays, optim
from mpipipe.comm.nccl import sums
from mpipipe.errors import BackendError, NonFiniteError
from mpipipe.language.models import GPT
from mpipipe.train import train
from mpipipe.train.trainer import Trainer

config = config_fixture(steps=5, eval_every=5, device="auto")


def curve_of(config, comm):
    """(loss, norm of gradients) of each step of a training; a norm that was not finite is None."""
    train(config, GPT, comm)
    return [(entry["loss"], entry.get("grad_norm")) for entry in metrics(config)[1:]]


def close_losses(found, expected, dtype):
    """(loss, norm of gradients) of each step of two of these small trainings."""
    if arrays.is_half(arrays.dtype(dtype)):
        for one, other, what in zip(zip(*found), zip(*expected), ("losses", "norms of gradients")):
            close_norm(one, other, roundings(MODEL), dtype, what)
    else:
        close_curves(found, expected, MODEL, dtype)


FEW, LONG = [pytest.mark.few], [pytest.mark.few, pytest.mark.long]
DTYPES = [("float32", ()), ("bfloat16", LONG), ("float64", LONG), ("float16", LONG)]


@pytest.mark.parametrize("dtype", [pytest.param(name, marks=marks) for name, marks in DTYPES])
def test_a_training_on_the_gpu_takes_the_steps_of_the_host(gpu, comm, config, dtype):
    keys = dict(dtype=dtype, dropout=0.1, pipe=max(1, comm.size // 2))
    close_losses(*(curve_of(config(device, device=device, **keys), comm) for device in ("cpu", "cuda")), dtype)


@pytest.mark.few
def test_a_gradient_that_is_not_finite_ends_the_training_with_its_step(gpu, comm, config, monkeypatch):
    """Where one GPU has the whole model it is found with the next record, or before."""

    def spoiled(optimizer, *rest, made=optim.scaled_step, **options):
        if optimizer.steps == 1:
            flat = optimizer.stages[0].gradients.flat
            arrays.copy_into(flat, arrays.upload(np.full(flat.size, math.nan, flat.dtype)))
        return made(optimizer, *rest, **options)

    monkeypatch.setattr(optim, "scaled_step", spoiled)
    when = " in step 2 of the optimizer" if comm.size == 1 else ""
    with pytest.raises(NonFiniteError, match=rf"step [2-5] of 5: the gradient of parameter .* is not finite{when}"):
        train(config(log_every=10, pipe=comm.size), GPT, comm)


@pytest.mark.few
def test_auto_takes_the_gpu_that_every_rank_sees_and_says_so(gpu, comm, config, capsys, monkeypatch):
    seen = []

    def watched(self, step, original=Trainer.step):
        seen.append({arrays.device_of(stage.parameters.flat) for stage in self.pipeline.stages})
        return original(self, step)

    monkeypatch.setattr(Trainer, "step", watched)
    record = train(config(steps=3, sample_bytes=6), GPT, comm)
    assert seen == [{"cuda"}] * 3 and math.isfinite(record.validation)
    assert 0 <= record.bubble < 1 and 0 <= record.predicted < 1
    printed = capsys.readouterr().out
    assert ("on GPUs" in printed and "--- sample" in printed) == (comm.rank == 0)


@pytest.mark.few
def test_a_rank_without_the_kernel_that_was_asked_for_stops_all_before_the_first_step(gpu, comm, config, monkeypatch):
    if gpu.real:
        pytest.skip("needs the changeable machine of the emulated device")
    monkeypatch.setenv("MPIPIPE_ATTENTION", "cudnn")
    chosen = config(device="cuda", dtype="bfloat16")
    if comm.rank == comm.size - 1:
        gpu.machine.faults.add("cudnn")
    with pytest.raises(BackendError, match=r"asks for cuDNN: the library libcudnn\.so\.9 cannot be loaded"):
        train(chosen, GPT, comm)
    assert not Path(chosen.out).exists()


@pytest.mark.long
@pytest.mark.parametrize("seq", [1, 2])
def test_a_training_leaves_the_null_stream_alone(gpu, comm, config, seq):
    """Kernels, copies and sums of all ranks are on streams of their own, whatever else the process does."""
    if gpu.real or comm.size < seq:
        pytest.skip("needs the counters of the emulated device" if gpu.real else "for two ranks")
    before = arrays.stream()
    train(config(device="cuda", dtype="bfloat16", seq=seq, sample_bytes=4), GPT, comm)
    assert gpu.machine.launches and gpu.machine.null_launches == []
    assert arrays.stream() == before


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype, pipe", [("float16", 2), ("float32", 1)])
def test_a_training_by_nccl_takes_the_steps_of_one_by_mpi(comm, config, monkeypatch, dtype, pipe):
    if comm.size not in (2, 2 * pipe):
        pytest.skip("more than two replicas add in another order")
    monkeypatch.setattr(sums, "BUCKET_BYTES", 4096)
    kept, step = [], Trainer.step

    def watched(self, number):
        kept.append(self.pipeline.ranks.sums_by_nccl)
        return step(self, number)

    monkeypatch.setattr(Trainer, "step", watched)
    curves = []
    with own_gpus(comm.rank, one_queue=True):
        for nccl, sharded in (("off", False), ("auto", False), ("auto", True)):
            monkeypatch.setenv("MPIPIPE_NCCL", nccl)
            keys = dict(device="cuda", dtype=dtype, pipe=pipe, layers=4, shard_optimizer=sharded)
            curves.append(curve_of(config(f"{nccl} {sharded}", **keys), comm))
    assert curves == [curves[0]] * 3 and kept == [False] * 5 + [True] * 10
