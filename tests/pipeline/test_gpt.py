"""A real GPT through the pipeline: the same bits however it is cut."""

import numpy as np
import pytest
from support import dense
from support.small_gpt import CUTS, MODEL, build, gradients, on_one_rank, parts_of, shared_out, text
from support.tolerance import close, largest
from support.training_tolerance import path

from mpipipe import Mesh, Pipeline, nn
from mpipipe.attention import Layout, Ring
from mpipipe.language.models import GPT
from mpipipe.schedules import gpipe, partition


@pytest.mark.parametrize(
    "microbatches, tied, dropout, dtype",
    [
        (3, False, 0.0, "float64"),
        (1, True, 0.25, "float32"),
        pytest.param(8, True, 0.25, "float64", marks=pytest.mark.long),
    ],
)
def test_gradients_have_the_same_bits_for_every_schedule_and_every_cut(comm, microbatches, tied, dropout, dtype):
    options = dict(tied=tied, dropout=dropout, dtype=dtype, rows=microbatches + 1)  # the first micro-batch is larger
    expected, loss = on_one_rank(microbatches, steps=2, **options)
    for number, (name, ranks, chunks), group in shared_out(comm, CUTS):
        recompute = (number + microbatches) % 2 == 0  # each cut meets both, with other micro-batches
        schedule = dense.build(name, ranks, chunks, microbatches)
        found, found_loss = gradients(group, schedule, steps=2, recompute=recompute, **options)
        assert found_loss == loss
        for key, gradient in found.items():
            assert gradient.tobytes() == expected[key].tobytes(), (name, ranks, chunks, recompute, key)


@pytest.mark.parametrize("layout, synchronous", [("zigzag", 1), ("contiguous", 0), ("striped", 1)])
def test_sequences_sharded_inside_pipeline_stages_give_the_dense_gradients(comm, monkeypatch, layout, synchronous):
    """pipe x seq = 2 x 2 on four ranks: a ring inside each stage, and two pipelines through the shards."""
    monkeypatch.setenv("MPIPIPE_SYNC_SENDS", str(synchronous))
    expected, loss = on_one_rank(3)
    with Mesh(comm, pipe=comm.size // 2 or 1, seq=min(2, comm.size)) as mesh:
        schedule = dense.build("interleaved_1f1b", mesh.pipe.size, 2, 3)
        cut = Layout(layout, mesh.seq.size, MODEL["seq_len"])
        ring = Ring(mesh.seq, layout=layout)
        stages = build(schedule, mesh.pipe.rank, attend=ring, token_positions=cut.positions(mesh.seq.rank))
        mine = dense.placed(schedule, mesh.pipe.rank, *(cut.shard(array, mesh.seq.rank) for array in text(9)))
        options = dict(loss=nn.softmax_cross_entropy, replicas=mesh.replicas)
        with Pipeline(stages, schedule, mesh.pipe, **options) as pipeline:
            for _ in range(2):
                found = pipeline.step(*mine).loss
    operations = path(GPT(**MODEL), 9 * MODEL["seq_len"])
    close(found, loss, operations)
    for stage in stages:
        for name in stage.gradients:
            close(stage.gradients[name], expected[name], operations, largest(expected[name]), what=name)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_many_copies_of_one_parameter_have_the_same_bits_for_every_cut(comm, chunks):
    """The sum over five tied copies is taken in the order of the stages, wherever they lie."""
    x, t = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)

    def run(group, schedule):
        layers = [nn.Linear(8, 8, bias=False, tie="w" if number % 5 < 3 else None) for number in range(12)]
        parts = partition([1] * 12, schedule.stages)
        cuts = [parts[number] for number in schedule.stages_of(group.rank)]
        stages = [nn.Stage(layers[start:stop], first=start, seed=1) for start, stop in cuts]
        with Pipeline(stages, schedule, group, loss=nn.mean_squared_error) as pipeline:
            pipeline.step(*dense.placed(schedule, group.rank, x, t))
        return {name: stage.gradients[name].tobytes() for stage in stages for name in stage.gradients}

    alone = parts_of(comm, 1)
    expected = run(alone, gpipe(1, 3))
    alone.Free()
    found = run(comm, dense.build("looped_bfs", comm.size, chunks, 3))
    assert found == {name: expected[name] for name in found}
