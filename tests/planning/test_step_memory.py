"""What a dry run foresees, against what trainings really allocate, and against counts made by hand."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mpipipe import nn, optim, schedules
from mpipipe.attention import Local
from mpipipe.errors import ConfigError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.language.task import estimate
from mpipipe.pipeline import Pipeline
from mpipipe.planning.step_memory import LayerRun, StageBytes, StageMeter, longest_run, peak_of_step
from mpipipe.train import TrainConfig

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
    """To 15 %: what an action takes on top is found from the resident memory, in pages and with gaps between arrays."""
    config = TrainConfig(**SIZES, **SHAPES[shape])
    (rank,) = estimate(config, GPT, 1).ranks
    foreseen = rank.total - rank.process - rank.messages
    assert foreseen == pytest.approx(allocated(config), rel=0.15)


def test_parameters_gradients_and_moments_are_those_of_the_layers():
    config = TrainConfig(**SIZES)
    found = estimate(config, GPT, 3)
    assert (found.problem.ranks, found.problem.replicas, found.problem.seq) == (3, 1, 1)
    assert sum(rank.count for rank in found.ranks) == found.parameters
    for rank in found.ranks:
        assert rank.parameters == rank.gradients == 4 * rank.count and rank.moments == 8 * rank.count
    narrow = estimate(TrainConfig(**SIZES, dtype="bfloat16", optimizer="sgd"), GPT, 3)
    for wide, rank in zip(found.ranks, narrow.ranks):
        assert rank.parameters == 6 * wide.count and rank.moments == rank.gradients == 4 * wide.count


def test_a_stage_of_many_layers_is_foreseen_from_two_repetitions():
    """Each layer more costs as much as the one before: a stage that is rehearsed whole says the same.

    What an action takes on top comes from the resident memory. Arrays are of a MiB here, as are the pieces in which
    kernels work: gaps between them grow with the layers, to some MiB of a backward, beside 90 MiB that are saved.
    """

    def stage(whole):
        model = GPT(dim=128, layers=6, heads=2, seq=128)
        meter = StageMeter(lambda: model.build(Local()), "float32", (), lambda stage: nn.softmax_cross_entropy)
        if whole:
            meter.kinds = [*range(2 * 6 + 2)]  # no two are alike
        tokens = np.zeros((16, 128), np.int64)
        return meter.stage(0, 2 * 6 + 2, tokens, tokens, False)

    short, shape = stage(whole=False)
    long, same = stage(whole=True)
    assert shape == same == (None, (((16, 128, 256), np.dtype("float32")),))
    for name, apart in {"saved": 1e-3, "pending": 1e-3, "forward": 0.1, "backward": 0.2}.items():
        assert getattr(short, name) == pytest.approx(getattr(long, name), rel=apart), name


@pytest.mark.parametrize(
    ("kinds", "run"),
    [
        ("EAFAFAFAFH", LayerRun(1, 2, 4)),
        ("AFAFAF", LayerRun(0, 2, 3)),
        ("EAAAAH", LayerRun(1, 1, 4)),
        ("EAFAFH", LayerRun(0, 6, 1)),  # cut to two there is nothing left out
        ("ABCABCABCABX", LayerRun(0, 3, 3)),
        ("", LayerRun(0, 0, 1)),
    ],
)
def test_the_longest_repetition_is_found(kinds, run):
    assert longest_run(kinds) == run


UNIT = StageBytes(0, 0, output=0, saved=100, pending=30, forward=0, backward=0, input_grad=0, weight_grad=0)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs", "dualpipe_v"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_follow_the_peak_of_the_schedule(name, ranks):
    """For stages of equal activations and nothing else, the walk says what the simulation counts."""
    chunks = 1 if name in ("gpipe", "one_f_one_b") else 2
    schedule = schedules.by_name(name, ranks=ranks, chunks=chunks, microbatches=2 * ranks)
    unit = UNIT if name != "dualpipe_v" else StageBytes(0, 0, 0, 100, 100, 0, 0, 0, 0)
    # what an action leaves is held from the next one on: the forward itself allocates it
    unit = StageBytes(**{**vars(unit), "forward": 100})
    counted = schedules.simulate(schedule).peak_activations
    for rank in range(ranks):
        held = peak_of_step(schedule, rank, [unit] * schedule.stages, [0] * schedule.stages)
        assert held.total == 100 * counted[rank]


def test_buffers_of_messages_are_as_many_as_are_posted_or_wait_for_a_backward():
    schedule = schedules.gpipe(2, 4)
    stages = [UNIT] * 2
    # rank 1 keeps the four inputs until its backwards, and gets no gradients; rank 0 gets four gradients one by one
    assert peak_of_step(schedule, 1, stages, [8, 10]).messages == 40
    assert 10 <= peak_of_step(schedule, 0, stages, [8, 10]).messages <= 40


def test_replicas_and_rings_divide_the_ranks():
    found = estimate(TrainConfig(**SIZES, pipe=2, seq=2), GPT, 8)
    assert (found.problem.ranks, found.problem.replicas, found.problem.seq) == (2, 2, 2)
    assert found.plan.rows == 4
    with pytest.raises(ConfigError, match="the mesh does not fit the ranks"):
        estimate(TrainConfig(**SIZES, pipe=3), GPT, 4)


@pytest.mark.long
@pytest.mark.parametrize("packing", ["none", "segments"])
def test_a_rank_of_a_ring_takes_its_share_of_each_sequence(packing):
    alone, ring = (estimate(TrainConfig(**SIZES, seq=seq, packing=packing), GPT, seq).ranks[0] for seq in (1, 4))
    assert ring.batch == alone.batch // 4
    assert ring.activations < alone.activations / 2
