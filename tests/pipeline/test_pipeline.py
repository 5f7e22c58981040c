"""The pipeline on real ranks against the dense model on one process, in float64."""

import numpy as np
import pytest
from support import dense
from support.tolerance import close, within

from mpipipe import Pipeline, nn, tracing
from mpipipe.errors import ArgumentError, MpipipeError, PeerError, StageError
from mpipipe.pipeline import construction
from mpipipe.schedules import gpipe, interleaved_1f1b, one_f_one_b, simulate


@pytest.mark.parametrize("microbatches, synchronous", [(1, 1), (3, 0), (8, 1)])
@pytest.mark.parametrize("name, chunks", dense.CASES)
def test_every_schedule_equals_the_dense_model(comm, monkeypatch, name, chunks, microbatches, synchronous):
    monkeypatch.setenv("MPIPIPE_SYNC_SENDS", str(synchronous))
    schedule = dense.build(name, comm.size, chunks, microbatches)
    peak = dense.check(comm, schedule, rows=11, steps=2).peak_activations
    assert peak == simulate(schedule).peak_activations[comm.rank]


@pytest.mark.parametrize(
    "name, chunks", [pytest.param("interleaved_1f1b", 2, marks=pytest.mark.long), ("zero_bubble_h1", 1)]
)
def test_messages_of_a_megabyte_and_artificial_tag_limits(comm, monkeypatch, name, chunks):
    monkeypatch.setenv("MPIPIPE_SYNC_SENDS", "1")
    monkeypatch.setattr(construction.runtime, "tag_upper_bound", lambda comm: 7)  # several channels
    schedule = dense.build(name, comm.size, chunks, 4)
    dense.check(comm, schedule, rows=4 * 40_000)


def test_two_pipelines_and_user_traffic_on_one_communicator(comm):
    """Interleaved calls of two pipelines, with messages of the user under the same tags in flight."""
    schedule = one_f_one_b(comm.size, 3)
    inputs, targets = dense.batch(6, schedule.stages)
    loss, gradients, _, _ = dense.reference(schedule.stages, inputs, targets)
    allowed = dense.bounds(schedule.stages, inputs, targets)
    mine = dense.placed(schedule, comm.rank, inputs, targets)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arriving = np.zeros((8, 20_000))
    receives = [comm.Irecv(arriving[tag], left, tag) for tag in range(8)]
    with (
        Pipeline(dense.model(schedule, comm.rank), schedule, comm, loss=dense.mean_squared) as one,
        Pipeline(dense.model(schedule, comm.rank), schedule, comm, loss=dense.mean_squared) as two,
    ):
        sends = [comm.Isend(np.full(20_000, 10.0 * comm.rank + tag), right, tag) for tag in range(8)]
        for pipeline in (one, two, one):
            pipeline.stages[0].gradient.fill(0)
            within(pipeline.step(*mine).loss, loss, allowed[0], "loss")
            within(pipeline.stages[0].gradient, gradients[comm.rank], allowed[1][comm.rank], "gradient")
    for request in (*receives, *sends):
        request.Wait()
    np.testing.assert_array_equal(arriving[:, 0], 10.0 * left + np.arange(8))


def test_all_reduce_starts_while_other_stages_still_compute(comm):
    """With two chunks per rank, the sum of the later chunk is under way before the earlier chunk's last backward."""
    alone = comm.Split(comm.rank, 0)
    schedule = interleaved_1f1b(1, 2, 3)
    stages = dense.model(schedule, 0, dense.ShownStage)
    inputs, targets = dense.batch(6, 2)
    with Pipeline(stages, schedule, alone, loss=dense.mean_squared, replicas=comm) as pipeline:
        with tracing.recording(pipeline, comm) as record:
            pipeline.step(inputs, targets)
    names = [span.name for span in record.spans]
    if comm.size > 1:
        assert names.index("all-reduce 1") < names.index("0B2") < names.index("all-reduce 0")
    alone.Free()


@pytest.mark.parametrize("chunks", [1, 2])
def test_stages_that_return_their_input_do_not_see_it_overwritten(comm, monkeypatch, chunks):
    """By messages, nor by the user, who may do so as soon as a call returns: large synchronous sends of that memory."""
    monkeypatch.setenv("MPIPIPE_SYNC_SENDS", "1")
    schedule, inputs = interleaved_1f1b(comm.size, chunks, 6), np.empty((6, 10_000))
    mine = dense.placed(schedule, comm.rank, inputs, np.zeros_like(inputs))
    with Pipeline([dense.Identity() for _ in range(chunks)], schedule, comm, loss=dense.mean_squared) as pipeline:
        for value in range(3):
            expected, found = value + np.arange(6 * 10_000.0).reshape(6, -1), []
            for call, count in ((pipeline.step, 2), (pipeline.evaluate, 2), (pipeline.forward, 1)):
                inputs[...] = expected
                found.append(call(*mine[:count]))
                inputs.fill(-50)
            result, evaluated, out = found
            close([result.loss, evaluated], [np.mean(expected**2)] * 2, inputs.size)
            if comm.rank == 0:
                close(np.concatenate(result.input_grads), 2 * expected / inputs.size, 4)
            if comm.rank == comm.size - 1:
                np.testing.assert_array_equal(out, expected)


def test_forward_and_evaluate_take_fewer_rows_or_micro_batches_and_step_takes_no_shorter_list(comm):
    schedule = one_f_one_b(comm.size, 6)
    inputs, targets = dense.batch(5, schedule.stages)
    loss, _, _, output = dense.reference(schedule.stages, inputs, targets)
    allowed = dense.bounds(schedule.stages, inputs, targets)
    whole = dense.placed(schedule, comm.rank, inputs, targets)
    pieces, aims = [inputs[:1], inputs[1:4], inputs[4:]], [targets[:1], targets[1:4], targets[4:]]
    mine = dense.placed(schedule, comm.rank, pieces, aims)
    with Pipeline(dense.model(schedule, comm.rank), schedule, comm, loss=dense.mean_squared) as pipeline:
        for call in (pipeline.step, pipeline.evaluate):
            with pytest.raises(ArgumentError, match="wrong length"):
                call(*mine)
        with pytest.raises(ArgumentError, match="wrong length"):
            pipeline.forward(None if mine[0] is None else [inputs] * 7)
        within(pipeline.evaluate(*whole), loss, allowed[0], "loss")
        together, out = pipeline.forward(whole[0]), pipeline.forward(mine[0])
    if out is not None:
        assert [len(piece) for piece in out] == [1, 3, 1]
        within(together, output, allowed[3], "output")
        within(np.concatenate(out), output, allowed[3], "output")


def test_bytes_are_counted_by_edge(comm):
    schedule = one_f_one_b(comm.size, 4)
    inputs, targets = dense.batch(8, schedule.stages)
    with Pipeline(dense.model(schedule, comm.rank), schedule, comm, loss=dense.mean_squared) as pipeline:
        pipeline.step(*dense.placed(schedule, comm.rank, inputs, targets))
        mailbox = pipeline.executor.messages.mailbox
        mailbox.put_header = mailbox.take_header = None  # the second step sends no headers
        pipeline.step(*dense.placed(schedule, comm.rank, inputs, targets))
        extents, expected = dense.widths(schedule.stages), {}
        if comm.rank < comm.size - 1:
            expected[comm.rank + 1, "forward"] = 8 * extents[comm.rank + 1] * 8
        if comm.rank > 0:
            expected[comm.rank, "backward"] = 8 * extents[comm.rank] * 8
        assert pipeline.bytes_per_edge == expected
        assert pipeline.bytes_sent == sum(expected.values())


def test_closing_twice_is_allowed_and_use_after_close_is_refused(comm):
    schedule = gpipe(comm.size, 1)
    pipeline = Pipeline(dense.model(schedule, comm.rank), schedule, comm, loss=dense.mean_squared)
    pipeline.close()
    pipeline.close()
    with pytest.raises(ArgumentError, match="closed"):
        pipeline.step(None, None)


def test_more_shapes_than_are_remembered(comm):
    schedule = gpipe(comm.size, 2)
    stages = dense.model(schedule, comm.rank)
    with Pipeline(stages, schedule, comm, loss=dense.mean_squared) as pipeline:
        for _ in range(2):
            for rows in range(2, 42):
                inputs, targets = dense.batch(rows, schedule.stages)
                stages[0].gradient.fill(0)
                pipeline.step(*dense.placed(schedule, comm.rank, inputs, targets))
                expected = dense.reference(schedule.stages, inputs, targets)[1][comm.rank]
                within(stages[0].gradient, expected, dense.bounds(schedule.stages, inputs, targets)[1][comm.rank])
        assert len(pipeline.executor.messages.kept) <= 32
        assert sum(map(len, pipeline.executor.messages.mailbox.slots.values())) < 300


def test_a_schedule_without_backward_cannot_train(comm):
    schedule = gpipe(comm.size, 2).forward_only_part(2)
    batch = dense.batch(4, schedule.stages)
    mine = dense.placed(schedule, comm.rank, *batch)
    with Pipeline(dense.model(schedule, comm.rank), schedule, comm, loss=dense.mean_squared) as pipeline:
        with pytest.raises(ArgumentError, match="cannot train"):
            pipeline.step(*mine)
        loss = dense.reference(schedule.stages, *batch)[0]
        within(pipeline.evaluate(*mine), loss, dense.bounds(schedule.stages, *batch)[0], "loss")


def test_what_a_stage_or_a_loss_returns_is_looked_at(comm):
    schedule, x = gpipe(comm.size, 1), np.ones((2, 3))
    forgets = dense.Identity()
    forgets.forward = lambda x: x
    for stage, loss, match in (
        (forgets, dense.mean_squared, r"returns \(output, saved\)"),
        (dense.Identity(), lambda y, t: (1.0, np.ones(2)), "gradient of the loss does not match"),
    ):
        pipeline = Pipeline([stage], schedule, comm, loss=loss)
        with pytest.raises(MpipipeError, match=match):
            pipeline.step(*dense.placed(schedule, comm.rank, x, x))


def test_a_weight_gradient_reads_the_input_that_was_received(comm):
    dense.check_weight_gradients_from_received_inputs(comm, "cpu")


class Turned(nn.Layer):
    """The identity with its output and its gradient in Fortran order; it raises on zeros."""

    def forward(self, x):
        if not x.any():
            raise ValueError("wet paint")
        return np.asfortranarray(x), None

    def backward_input(self, dy, saved):
        return np.asfortranarray(dy), None

    def backward_weight(self, pending):
        pass


def test_layers_may_return_arrays_in_any_order(comm):
    schedule, found = one_f_one_b(comm.size, 3), []
    x, t = np.random.default_rng(3).normal(size=(2, 6, 5, 4))
    for more in ([], [Turned()]):
        stages = [nn.Stage([*more, nn.Linear(4, 4), *(Turned() for _ in more)], "float64")]
        stages[0].parameters.flat[:] = np.random.default_rng(comm.rank).normal(size=24)
        with Pipeline(stages, schedule, comm, loss=nn.mean_squared_error) as pipeline:
            for _ in range(2):  # shapes are new in the first step
                loss = pipeline.step(*dense.placed(schedule, comm.rank, x, t)).loss
        found.append((loss, stages[0].gradients.flat.copy()))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-13)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-12, atol=1e-13)


def test_an_error_names_the_layer_that_it_came_through(comm):
    stage = nn.Stage([nn.Gelu(), nn.Residual(Turned())], "float64", first=2 * comm.rank)
    x = np.zeros((3, 4))
    pipeline = Pipeline([stage], gpipe(comm.size, 1), comm, loss=nn.mean_squared_error)
    with pytest.raises((StageError, PeerError), match=r"forward of layer 1.layer \(Turned\) raised ValueError: wet"):
        pipeline.step(*dense.placed(pipeline.schedule, comm.rank, x, x))
