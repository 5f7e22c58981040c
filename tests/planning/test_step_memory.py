"""What a dry run foresees, against what trainings really allocate, and against counts made by hand."""

import itertools
import mmap
import re
import runpy
import threading
import tracemalloc

import numpy as np
import pytest
from support.launch import ROOT
from support.small_training import estimate

from mpipipe import nn, optim, schedules
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.pipeline import Pipeline
from mpipipe.planning import memory
from mpipipe.planning.predict import step_peaks
from mpipipe.planning.profile import Sizes
from mpipipe.train import Task, TaskConfig, TrainConfig
from mpipipe.train.training_plan import estimate_task

SIZES = dict(dim=64, layers=4, heads=4, seq_len=128, batch=8, microbatches=4, sample_bytes=0, device="cpu")
SHAPES = {
    "one rank": {},
    "float64": {"dtype": "float64"},
    "bfloat16": {"dtype": "bfloat16"},
    "recompute": {"recompute": True},
    "some recomputed": {"recompute_limit": 2},
    "split backward": {"schedule": "zero_bubble_h1"},
    "two chunks": {"schedule": "interleaved_1f1b", "chunks": 2},
    "sgd": {"optimizer": "sgd"},
    "frozen": {"freeze": ("0.*", "1.*", "2.*")},
}


def allocated(config):
    """Most bytes that Python's allocator has at once in a training step on one rank, made without the dry run."""
    found = estimate(config, GPT, 1)
    plan_of = found.plan
    tokens = np.random.default_rng(0).integers(0, 256, (2, config.batch, config.seq_len))
    peaks = []

    def work(comm):
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            stages = plan_of.stages(
                0, found.task.layers(found.task.shard(comm, 1)), config.dtype, 0, frozen=config.freeze
            )
            loss = nn.softmax_cross_entropy
            with Pipeline(stages, plan_of.schedule, comm, loss=loss, recompute=config.recompute) as pipeline:
                chosen = optim.AdamW if config.optimizer == "adamw" else lambda *a: optim.SGD(*a, momentum=0.9)
                optimizer = chosen(pipeline.stages, 1e-3)
                for stage in pipeline.stages:
                    stage.optimizer_writes_compute()
                for _ in range(2):
                    tracemalloc.reset_peak()
                    pipeline.step(*tokens)
                    optimizer.step()
                peaks.append(tracemalloc.get_traced_memory()[1] - before)
        finally:
            tracemalloc.stop()

    for _ in range(2):  # what is imported at the first time is no array
        inprocess.run(1, work)
    return peaks[-1]


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_arrays_are_foreseen_as_a_step_allocates_them(shape):
    """To 3 %: besides arrays there are some kilobytes of objects of Python."""
    config = TrainConfig(**SIZES, **SHAPES[shape])
    (rank,) = estimate(config, GPT, 1).ranks
    foreseen = rank.total - rank.process - rank.messages
    assert foreseen == pytest.approx(allocated(config), rel=0.03)


def test_parameters_gradients_and_moments_are_those_of_the_layers():
    config = TrainConfig(**SIZES)
    found = estimate(config, GPT, 3)
    assert (found.problem.ranks, found.problem.replicas, found.problem.seq) == (3, 1, 1)
    assert sum(rank.count for rank in found.ranks) == found.task.model.parameters
    for rank in found.ranks:
        assert rank.parameters == rank.gradients == 4 * rank.count and rank.moments == 8 * rank.count
    narrow = estimate(TrainConfig(**SIZES, dtype="bfloat16", optimizer="sgd"), GPT, 3)
    for wide, rank in zip(found.ranks, narrow.ranks):
        assert rank.parameters == 6 * wide.count and rank.moments == rank.gradients == 4 * wide.count
    for (replicas, seq), dtype in itertools.product(((2, 1), (1, 2), (2, 2)), ("float32", "bfloat16")):
        keys = dict(**SIZES, dtype=dtype, freeze=("0.*",), pipe=3, seq=seq)
        plain, sharded = (
            estimate(TrainConfig(**keys, shard_optimizer=cut), GPT, 3 * replicas * seq) for cut in (False, True)
        )
        for whole, rank in zip(plain.ranks, sharded.ranks):
            left = whole.gradients * (1 - 1 / (replicas * seq))  # with the other ranks
            assert rank.moments == pytest.approx(whole.moments - 2 * left, rel=0.01)
            assert rank.gradients == whole.gradients
            if dtype == "float32":
                assert rank.parameters == whole.parameters
                continue
            assert rank.parameters == pytest.approx(whole.parameters - left, rel=1e-3)
            assert rank.start + rank.parameters == pytest.approx(whole.start + whole.parameters, rel=0.01)
            assert rank.total >= rank.process + rank.parameters + rank.gradients + rank.moments + left


class Tanh(nn.Layer):
    """Keeps its output."""

    def forward(self, x):
        y = np.tanh(x)
        return y, y

    def backward_input(self, dy, saved):
        return dy * (1 - saved**2), None


class Columns(Task):
    """Layers that keep their input, their output, both or neither, one by one or all in one."""

    whole = False

    def layers(self, shard):
        parts = [part for _ in range(6) for part in (nn.Linear(64, 64), Tanh(), nn.Linear(64, 64), nn.Gelu())]
        parts = [*parts, *(nn.Residual(nn.Linear(64, 64)) for _ in range(4)), nn.Linear(64, 4)]
        return [nn.Sequential(parts)] if self.whole else parts

    def loss(self, output, target):
        difference = output - target
        return float((difference**2).mean()), 2 * difference / difference.size

    def batch(self, step, rows, shard):
        return np.ones((len(rows), 64), np.float32), np.ones((len(rows), 4), np.float32)

    validation = batch


@pytest.mark.parametrize("keys", [{}, {"schedule": "zero_bubble_h1"}, {"recompute": True}])
def test_layers_one_by_one_add_up_to_what_they_take_together(keys):
    config = TaskConfig(batch=2048, microbatches=2, device="cpu", **keys)

    class Whole(Columns):
        whole = True

    one, whole = (estimate_task(lambda comm, task=task: (config, task()), 1).ranks[0] for task in (Columns, Whole))
    assert one.count == whole.count and one.batch == whole.batch
    assert one.activations + one.scratch == pytest.approx(whole.activations + whole.scratch, rel=0.01)
    assert one.activations == whole.activations


def test_memory_that_the_process_takes_for_other_things_does_not_count(monkeypatch):
    """A thread takes 8 MiB again and again, which stand for whatever a process that has run for long does besides."""
    monkeypatch.setattr(memory, "UNTRACED", set())
    config, done = TaskConfig(batch=2048, microbatches=2, device="cpu"), threading.Event()

    def scratch():
        return estimate_task(lambda comm: (config, Columns()), 1).ranks[0].scratch

    def disturb():
        while not done.is_set():
            with mmap.mmap(-1, 8 << 20) as pages:
                pages[:: mmap.PAGESIZE] = bytes(len(pages) // mmap.PAGESIZE)

    alone, thread = scratch(), threading.Thread(target=disturb)
    thread.start()
    try:
        assert scratch() == pytest.approx(alone, rel=0.03)
    finally:
        done.set()
        thread.join()


def test_the_last_rank_that_measures_stops_the_trace_but_not_beside_a_thread_of_a_user(monkeypatch):
    """To stop it while another thread allocates is a SIGSEGV of Python 3.13.0."""
    monkeypatch.setattr(memory, "UNTRACED", set())
    threads = [threading.main_thread(), threading.Thread(name="mpipipe watchdog of a test")]
    monkeypatch.setattr(threading, "enumerate", lambda: threads)  # those of other tests may be left
    tracemalloc.stop()  # which was left on beside such a thread
    first, second = memory.tracing(), memory.tracing()
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert tracemalloc.is_tracing()
    second.__exit__(None, None, None)
    assert not tracemalloc.is_tracing()
    with memory.tracing():
        threads.append(threading.Thread(name="of a user"))
    assert tracemalloc.is_tracing()
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs", "dualpipe_v"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_follow_the_peak_of_the_schedule(name, ranks):
    """For stages of equal activations and nothing else, a rank holds what the simulation counts."""
    chunks = 1 if name in ("gpipe", "one_f_one_b") else 2
    schedule = schedules.by_name(name, ranks=ranks, chunks=chunks, microbatches=2 * ranks)
    unit = Sizes(saved=100, forward=100, pending=100 if name == "dualpipe_v" else 30)
    counted = schedules.simulate(schedule).peak_activations
    assert step_peaks(schedule, [unit] * schedule.stages) == [(100 * count, 0) for count in counted]


def test_buffers_of_messages_are_as_many_as_are_posted_or_wait_for_a_backward():
    """Rank 1 keeps the four inputs until its backwards, and gets no gradients; rank 0 gets four one by one."""
    config = TaskConfig(batch=64, microbatches=4, schedule="gpipe", device="cpu")
    first, second = estimate_task(lambda comm: (config, Columns()), 2).ranks
    message = 16 * 64 * 4
    assert second.messages == 4 * message and message <= first.messages <= 4 * message


@pytest.mark.long
@pytest.mark.parametrize("packing", ["none", "segments"])
def test_a_rank_of_a_ring_takes_its_share_of_each_sequence(packing):
    alone, ring = (estimate(TrainConfig(**SIZES, seq=seq, packing=packing), GPT, seq).ranks[0] for seq in (1, 4))
    assert ring.batch == alone.batch // 4
    assert ring.activations < alone.activations / 2


def test_the_start_takes_what_initial_values_are_drawn_into():
    """A table that is large against a step: the peak is at the start where the optimizer keeps nothing."""
    config = TrainConfig(**{**SIZES, "layers": 1, "vocab": 100_000, "seq_len": 8}, optimizer="sgd", momentum=0.0)
    ranks = estimate(config, GPT, 2).ranks
    table = 4 * 100_000 * 64
    assert min(rank.start for rank in ranks) > 0.9 * table
    first = ranks[0]
    assert first.total - first.process > first.parameters + first.gradients + 0.9 * table


# -- the peak of resident memory, against that of a real training on two ranks

JOB = """
import atexit, runpy, sys
from mpipipe.planning.memory import peak
atexit.register(lambda: print("peak", peak(), file=sys.stderr))
sys.argv = ["mpipipe", *{arguments}]
runpy.run_module("mpipipe", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["darcy", "weather", pytest.param("unet", marks=pytest.mark.judges)])
def test_a_training_takes_what_is_predicted_to_ten_percent(launch, tmp_path, name):
    values = []
    if name == "weather":
        pytest.importorskip("h5py")
        data = str(tmp_path / "weather.h5")
        runpy.run_path(str(ROOT / "docs" / "tasks" / "weather.py"))["write"](data, members=16, days=4)
        values = ["--set", f"data={data}", "--set", "members=16", "--set", "days=4"]
    elif name == "unet":
        pytest.importorskip("torch")
    task = ["train", str(ROOT / "docs" / "tasks" / f"{name}.py"), *values, "--pipe", "2", "--batch", "16"]
    trained = [*task, "--steps", "2", "--out", str(tmp_path / "run")]
    job = launch(2, JOB.format(arguments=trained), timeout=240)
    assert job.returncode == 0, job.stderr
    peaks = [int(found) / 2**20 for found in re.findall(r"peak (\d+)", job.stderr)]
    dry = launch(0, ["-m", "mpipipe", *task, "--dry-run", "--ranks", "2"], timeout=240)
    assert dry.returncode == 0, dry.stderr
    predicted = [float(total) for total in re.findall(r"^ +[01] .* (\d+\.\d)$", dry.stdout, re.MULTILINE)]
    assert len(peaks) == 2 and sorted(predicted) == pytest.approx(sorted(peaks), rel=0.1)
