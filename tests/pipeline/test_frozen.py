"""Pipelines with frozen stages: all others have the gradients they had, and nothing is sent for the frozen ones."""

import pytest
from support import dense
from support.small_gpt import MODEL, build, parts_of, text

from mpipipe import Mesh, Pipeline, nn, optim
from mpipipe.errors import ArgumentError
from mpipipe.language.models import GPT
from mpipipe.schedules import partition, simulate, with_frozen


def run(comm, schedule, patterns, recompute):
    """({name: gradient}, loss, pipeline) of this rank after a step."""
    stages = build(schedule, comm.rank, "float32", frozen=patterns)
    mine = dense.placed(schedule, comm.rank, *text(5))
    with Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy, recompute=recompute) as pipeline:
        result = pipeline.step(*mine)
    return {name: stage.gradients[name] for stage in stages for name in stage.gradients}, result.loss, pipeline


def patterns_of(parts, frozen):
    return [f"{layer}.*" for stage in frozen for layer in range(*parts[stage])]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["one_f_one_b", "looped_bfs", "zero_bubble_v"])
def test_gradients_of_trained_stages_have_the_bits_they_have_without_frozen_ones(comm, name, recompute):
    ranks = min(comm.size, 4)
    group = parts_of(comm, ranks)
    schedule = dense.build(name, ranks, 1 if name in ("one_f_one_b", "zero_bubble_h1") else 2, 3)
    expected, loss, _ = run(group, schedule, [], recompute)
    last, parts = schedule.stages - 1, partition(GPT(**MODEL).costs(), schedule.stages)
    for frozen in {(0,), (last,), tuple(range(last)), (0, last // 2)}:
        if len(set(frozen)) == schedule.stages:
            continue
        plan = with_frozen(schedule, set(frozen))
        found, found_loss, pipeline = run(group, plan, patterns_of(parts, frozen), recompute)
        assert found_loss == loss
        assert pipeline.peak_activations == simulate(plan).peak_activations[group.rank]
        mine = {stage for stage in schedule.stages_of(group.rank) if stage not in frozen}
        assert {int(key.partition(".")[0]) for key in found} == {n for stage in mine for n in range(*parts[stage])}
        for key, gradient in found.items():
            assert gradient.tobytes() == expected[key].tobytes(), (frozen, key)
        low = min(set(range(schedule.stages)) - set(frozen))
        sent = {edge for edge, way in pipeline.bytes_per_edge if way == "backward"}
        assert all(edge > low for edge in sent), "no gradient goes to stages without a backward"
    group.Free()


@pytest.mark.mpi(min_size=2)
def test_replicas_sum_what_is_trained_and_nothing_else(comm):
    with Mesh(comm, pipe=comm.size // 2) as mesh:
        schedule = dense.build("one_f_one_b", mesh.pipe.size, 1, 2)
        patterns = ["0.*", "*.gain", "1.layer.1.out"]
        stages = build(schedule, mesh.pipe.rank, "float32", frozen=patterns)
        inputs, targets = text(8)
        rows = slice(4 * mesh.data.rank, 4 * mesh.data.rank + 4)
        mine = dense.placed(schedule, mesh.pipe.rank, inputs[rows], targets[rows])
        optimizer = optim.AdamW(stages, 1e-2)
        before = {name: stage.parameters[name].copy() for stage in stages for name in stage.frozen}
        with Pipeline(stages, schedule, mesh.pipe, loss=nn.softmax_cross_entropy, replicas=mesh.replicas) as pipeline:
            pipeline.step(*mine)
            sums = [sum(each.size for each in adapter.gradient_arrays) for adapter in pipeline.executor.stages]
            optim.clip_by_global_norm(stages, 1.0, mesh.pipe)
            optimizer.step()
        for stage, size in zip(stages, sums):
            assert size == stage.gradients.flat.size < sum(a.size for a in stage.parameters.values())
            flats = mesh.replicas.allgather(stage.parameters.flat)
            assert all(flat.tobytes() == flats[0].tobytes() for flat in flats)
        for stage in stages:
            for name in stage.frozen:
                assert stage.parameters[name].tobytes() == before[name].tobytes(), name


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "chunks, patterns, frozen, match",
    [(1, ["0.weight"], (), "frozen in some of its places only"), (2, [], {0}, "no backward for it")],
    ids=["one place of a tied parameter", "a stage that trains without a backward"],
)
def test_frozen_parameters_that_do_not_fit_are_refused_on_all_ranks(comm, chunks, patterns, frozen, match):
    schedule = dense.build("looped_bfs", comm.size, chunks, 2)
    stages = build(schedule, comm.rank, "float32", frozen=patterns, tied=True)
    with pytest.raises(ArgumentError, match=match):
        Pipeline(stages, with_frozen(schedule, frozen) if frozen else schedule, comm, loss=nn.softmax_cross_entropy)
