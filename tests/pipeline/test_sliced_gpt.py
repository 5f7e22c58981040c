"""A GPT whose sequences go through the pipeline slice by slice has the gradients of whole sequences."""

import pytest
from support import dense
from support.dense import near
from support.small_gpt import CUTS, MODEL, build, gradients, on_one_rank, shared_out, text

from mpipipe import Mesh, Pipeline, arrays, nn
from mpipipe.attention import Layout, Local, Ring, Sliced
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess
from mpipipe.schedules import gpipe, one_f_one_b

SEQ = MODEL["seq_len"]
WINDOWS = (4, None, 4, 7, None)


@pytest.mark.parametrize(
    "lengths, microbatches, options",
    [
        pytest.param((5, 4, 3), 2, dict(windows=WINDOWS, tied=True), marks=pytest.mark.long),
        ((7, 5), 1, dict(positions="learned", qk_norm=True)),
    ],
)
def test_gradients_equal_those_of_whole_sequences_for_every_generator(comm, lengths, microbatches, options):
    """Of each generator, on 1, 2 and 4 ranks with 1 and 2 stages."""
    expected, expected_loss = on_one_rank(microbatches, rows=3, **options)
    cuts = [cut for cut in CUTS if cut[2] < 3]
    for number, (name, ranks, chunks), group in shared_out(comm, cuts):
        schedule = dense.build(name, ranks, chunks, microbatches, len(lengths))
        how = dict(rows=3, recompute=number % 2 == 1, slice_lengths=lengths, **options)
        found, loss = gradients(group, schedule, attend=Sliced(Local(), lengths), **how)
        near(loss, expected_loss)
        for key, gradient in found.items():
            near(gradient, expected[key], (name, ranks, chunks, key))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
def test_slices_of_sequences_that_are_sharded_over_a_ring(comm, kind):
    expected, loss = on_one_rank(3)
    lengths = (5, 4, 3)
    with Mesh(comm, pipe=comm.size // 2, seq=2) as mesh:
        schedule = one_f_one_b(mesh.pipe.size, 3, slices=3)
        layout = Layout(kind, 2, SEQ, lengths)
        attend = Sliced(Ring(mesh.seq, layout=layout), lengths)
        stages = build(schedule, mesh.pipe.rank, attend=attend)
        mine = [layout.shard(array, mesh.seq.rank) for array in text(9)]
        options = dict(loss=nn.softmax_cross_entropy, replicas=mesh.replicas, slice_lengths=attend.slice_rows)
        with Pipeline(stages, schedule, mesh.pipe, **options) as pipeline:
            near(pipeline.step(*dense.placed(schedule, mesh.pipe.rank, *mine)).loss, loss)
        for stage in stages:
            for key in stage.gradients:
                near(stage.gradients[key], expected[key], key)


def test_slices_on_the_device(gpu, comm):
    """Gradients are those of the host, and outputs are put together along both axes."""
    lengths, sizes = (5, 4, 3), dict(layers=3, windows=(4, None, 7))
    expected, loss = gradients(comm, gpipe(comm.size, 2), rows=3, **sizes)
    schedule = dense.build("zero_bubble_h1", comm.size, 1, 2, 3)
    how = dict(rows=3, slice_lengths=lengths, attend=Sliced(Local(), lengths), device="cuda", **sizes)
    found, value = gradients(comm, schedule, **how)
    near(value, loss)
    for key, gradient in found.items():
        near(gradient, expected[key], key)
    outputs = []
    for plan, attend, device, cut in (
        (gpipe(comm.size, 2), None, "cpu", None),
        (schedule, how["attend"], "cuda", lengths),
    ):
        stages = build(plan, comm.rank, attend=attend, device=device, **sizes)
        with Pipeline(stages, plan, comm, slice_lengths=cut) as pipeline:
            outputs.append(pipeline.forward(dense.placed(plan, comm.rank, *text(3))[0]))
    if outputs[0] is not None:
        near(arrays.download(outputs[1]), outputs[0])


@pytest.mark.parametrize(
    "attend, lengths, slices, says",
    [
        (Local(causal=True), None, 2, r"found: 1\.\S+ \(SelfAttention\)"),
        (Sliced(Local(), (6, 6)), (7, 5), 2, "of lengths 7, 5"),
        # where the lengths fit by chance, slices of several sequences would be those of one
        (Sliced(Local(), (4, 4, 4)), None, 2, "Sliced of 2 slices"),
        (Sliced(Local(), (4, 4, 4)), None, 1, "Sliced of 1 slice\n"),
    ],
)
def test_attention_that_does_not_take_the_slices_is_refused_on_all_ranks(attend, lengths, slices, says):
    schedule = one_f_one_b(2, 3, slices=slices)

    def job(comm):
        stages = build(schedule, comm.rank, attend=attend)
        with pytest.raises(ArgumentError, match=says) as caught:
            Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy, slice_lengths=lengths)
        return str(caught.value)

    assert len({*inprocess.run(2, job)}) == 1
