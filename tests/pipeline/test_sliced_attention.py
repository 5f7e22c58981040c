"""A GPT in a pipeline of slices, also over rings: loss and gradients are those of whole sequences on one rank."""

from __future__ import annotations

import numpy as np
import pytest

import mpipipe
from mpipipe import Pipeline, nn, schedules
from mpipipe.attention import Layout, Local, Ring, Sliced
from mpipipe.errors import ArgumentError, StageError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.language.packing import PackedAttend, Packing

SEQ, ROWS, VOCAB = 24, 4, 13
MODEL = dict(vocab=VOCAB, dim=16, layers=2, heads=4, kv_heads=2, hidden=24, seq=SEQ)
TEXT = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1))
SEGMENTS = np.cumsum(np.random.default_rng(1).random((ROWS, SEQ)) < 0.2, axis=1)


def train(comm, name, lengths, seq=1, kind="zigzag", pack=False, sizes=(), **options):
    """(loss, evaluated loss, gradients of this rank) of the second step; the ranks of `comm` are pipe x seq."""
    with mpipipe.Mesh(pipe=comm.size // seq, seq=seq, comm=comm) as mesh:
        layout = Layout(kind, seq, SEQ, lengths)
        attend = Local() if seq == 1 else Ring(mesh.seq, layout=layout)
        attend = attend if len(lengths) == 1 else Sliced(attend, lengths)
        rows, packing = attend.slice_rows, Packing(2)
        packing.begin(SEGMENTS)
        attend = PackedAttend(attend, packing) if pack else attend
        layers = GPT(**MODEL, **dict(sizes)).build(attend)
        schedule = schedules.by_name(name, ranks=mesh.pipe.size, microbatches=2, slices=len(lengths))
        stages = mpipipe.cut(layers, schedule, mesh.pipe.rank, dtype="float64")
        x, y = (layout.shard(part, mesh.seq.rank) for part in (TEXT[:, :-1], TEXT[:, 1:]))
        x, y = x if stages.is_first else None, y if stages.is_last else None
        options |= dict(loss=nn.softmax_cross_entropy, replicas=mesh.replicas, slice_lengths=rows)
        with Pipeline(stages, schedule, mesh.pipe, **options) as pipeline:
            pipeline.step(x, y)
            evaluated = pipeline.evaluate(x, y)
            loss = pipeline.step(x, y).loss
            for _, layer in [pair for stage in stages for pair in stage._named_layers()]:
                if isinstance(layer, nn.SelfAttention):
                    assert not getattr(layer._attend.inner if pack else layer._attend, "_sequences", None)
            return loss, evaluated, {name: x.copy() for stage in stages for name, x in stage.gradients.items()}


def same(results, **options):
    """Assert that the results of ranks are those of whole sequences."""
    loss, _, expected = inprocess.run(1, lambda comm: train(comm, "gpipe", (SEQ,), **options))[0]
    found = {name: x for _, _, gradients in results for name, x in gradients.items()}
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-12 * np.abs(x).max(), err_msg=name)
    for numbers in zip(*[result[:2] for result in results]):
        np.testing.assert_allclose([x for x in numbers if x is not None], loss, rtol=1e-12)


CASES = [
    ("one_f_one_b", (14, 10), {}), ("one_f_one_b", (9, 8, 7), dict(recompute=True)), ("zero_bubble_h1", (3,) * 8, {}),
    ("gpipe", (9, 8, 7), dict(sizes=dict(windows=(5, None)))), ("one_f_one_b", (9, 8, 7), dict(pack=True)),
    ("zero_bubble_h1", (14, 10), dict(sizes=dict(positions="learned"))),
    ("one_f_one_b", (9, 8, 7), dict(check=True)), ("zero_bubble_h1", (14, 10), dict(check=True, recompute=True)),
]  # fmt: skip


@pytest.mark.parametrize("name, lengths, options", CASES, ids=str)
def test_a_pipeline_of_slices_trains_as_one_of_whole_sequences(name, lengths, options):
    same(inprocess.run(2, lambda comm: train(comm, name, lengths, **options)), **options)


@pytest.mark.parametrize("kind", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("name, lengths, options", CASES[::2], ids=str)
def test_each_slice_is_sharded_over_a_ring(kind, name, lengths, options):
    results = inprocess.run(4, lambda comm: train(comm, name, lengths, 2, kind, **options), synchronous=True)
    same(results, **options)


def test_real_ranks(comm):
    seq = 2 if comm.size % 2 == 0 else 1
    results = comm.allgather(train(comm, "one_f_one_b", (9, 8, 7), seq))
    same(results)


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_a_step_that_has_failed_half_way_is_repeated_by_another_pipeline(rows):
    lengths, schedule, calls = (9, 8, 7), schedules.one_f_one_b(1, 2, slices=3), []
    x, y = map(np.ascontiguousarray, (TEXT[:, :-1], TEXT[:, 1:]))

    def loss(output, target):
        calls.append(target)
        if len(calls) == 5:  # backwards of the first sequence have been
            raise RuntimeError("once")
        return nn.softmax_cross_entropy(output, target)

    loss.mean_over_entries = True

    def on_rank(comm):
        found = []
        for fails in (False, True):
            stages = mpipipe.cut(GPT(**MODEL).build(Sliced(Local(), lengths)), schedule, 0, dtype="float64")
            if fails:
                calls.clear()
                with (
                    pytest.raises(StageError, match="once"),
                    Pipeline(stages, schedule, comm, loss, slice_lengths=lengths) as pipeline,
                ):
                    pipeline.step(x, y)
            with Pipeline(stages, schedule, comm, nn.softmax_cross_entropy, slice_lengths=lengths) as pipeline:
                pipeline.step(x[:rows], y[:rows])
            found.append(stages[0].gradients.flat)
        np.testing.assert_array_equal(*found)

    inprocess.run(1, on_rank)


def test_attention_to_whole_sequences_is_refused():
    schedule = schedules.by_name("gpipe", ranks=1, microbatches=2, slices=2)

    def on_rank(comm):
        stages = mpipipe.cut(GPT(**MODEL).build(Local()), schedule, 0)
        with pytest.raises(ArgumentError, match="SelfAttention"):
            Pipeline(stages, schedule, comm, nn.softmax_cross_entropy)

    inprocess.run(1, on_rank)


@pytest.mark.parametrize("slices, expected", [(2, "Sliced of 2 slices"), (1, "the schedule has whole ones")])
def test_attention_to_another_number_of_slices_is_refused(slices, expected):
    """Where the lengths fit by chance, slices of several sequences would be those of one."""
    schedule = schedules.by_name("gpipe", ranks=1, microbatches=3, slices=slices)

    def on_rank(comm):
        stages = mpipipe.cut(GPT(**{**MODEL, "seq": 12}).build(Sliced(Local(), (4, 4, 4))), schedule, 0)
        with pytest.raises(ArgumentError, match=expected):
            Pipeline(stages, schedule, comm, nn.softmax_cross_entropy)

    inprocess.run(1, on_rank)
