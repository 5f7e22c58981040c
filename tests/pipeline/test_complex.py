"""Complex numbers in pipelines, over skips and replicas, in norms, optimizers and checkpoints: dRe + i dIm."""

import copy
from functools import partial

import numpy as np
import pytest
from support import complex_model, dense
from support.complex_model import Wave
from support.gradients import gradient_norm

from mpipipe import Branches, Mesh, Pipeline, checkpoint, nn, optim, schedules
from mpipipe.errors import ArgumentError, StageError
from mpipipe.job import inprocess

ENOUGH = 1e-12


def near(found, expected, what=""):
    np.testing.assert_allclose(found, expected, rtol=0, atol=ENOUGH, err_msg=what)


def test_the_reference_has_the_gradients_of_difference_quotients():
    z, far = complex_model.batch(2)
    for number, (gives, takes) in enumerate(complex_model.places(3)):
        x = Branches(z, far=(far, abs(z) ** 2)) if takes else z
        assert max(nn.check_gradients(Wave(number, gives, takes), x).values()) < 1e-8


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_stages_in_numpy_are_one_process(comm, name, recompute):
    schedule = complex_model.built(name, comm.size)
    if schedule is None:
        return
    data = complex_model.batch()
    loss, gradients, dx = complex_model.reference(schedule.stages, *data)
    ends = complex_model.places(schedule.stages)
    stages = [Wave(number, *ends[number]) for number in schedule.stages_of(comm.rank)]
    with Pipeline(stages, schedule, comm, loss=nn.mean_squared_error, recompute=recompute) as pipeline:
        for scale in (1, 8):  # the second call has its receives posted
            result = pipeline.step(*dense.placed(schedule, comm.rank, *data), scale=scale)
            near(result.loss, loss, "loss")
            for number, stage in zip(schedule.stages_of(comm.rank), stages):
                near(stage.gradients.flat / scale, gradients[number].flat, f"stage {number}")
            if result.input_grads is not None:
                near(np.concatenate(result.input_grads), dx, "dx")
        near(pipeline.evaluate(*dense.placed(schedule, comm.rank, *data)), loss, "evaluation")
    squares = sum(np.sum(abs(each.flat) ** 2) for each in gradients) * scale**2
    assert gradient_norm(stages, comm) == pytest.approx(np.sqrt(squares), rel=1e-13)
    optim.clip_by_global_norm(stages, 0.5, comm)
    for number, stage in zip(schedule.stages_of(comm.rank), stages):
        near(stage.gradients.flat, gradients[number].flat * scale * 0.5 / np.sqrt(squares), "clipped")


def test_replicas_are_summed(pair):
    data, schedule = complex_model.batch(), schedules.gpipe(1, 2)
    stage, whole = (Wave(0, dtype="complex64") for _ in range(2))
    mine = [(x[:3], x[3:])[pair.rank].astype("complex64") for x in data]
    alone = pair.Split(pair.rank, 0)
    with Pipeline([stage], schedule, alone, loss=nn.mean_squared_error, replicas=pair) as pipeline:
        pipeline.step(*mine)
    y, saved = whole.forward(data[0])
    whole.backward(complex_model.squared(y, data[1])[1], saved)
    assert stage.gradients.flat.dtype == np.complex64
    np.testing.assert_allclose(stage.gradients.flat, whole.gradients.flat, rtol=1e-5, atol=1e-5)
    alone.Free()


@pytest.mark.parametrize(
    "make", [optim.AdamW, partial(optim.SGD, momentum=0.9, weight_decay=0.1)], ids=["AdamW", "SGD"]
)
def test_optimizers_and_checkpoints_take_complex_parameters_as_pairs_of_real_ones(comm, make, mpi_tmp_path):
    """Vectors of complex numbers do not decay, as vectors of real ones."""
    stage = Wave(comm.rank)
    ours = make([stage], lr=0.01)

    class Pairs:
        parameters, gradients = (nn.FlatBuffer({"w": (3, 3, 2), "c": (1, 3, 2)}, "float64") for _ in range(2))
        decay_ranges = ((0, 24, True), (24, 32, False))  # 18 numbers and a gap

    for name in "wc":
        Pairs.parameters[name].reshape(-1)[:] = getattr(stage, name).reshape(-1).view(float)
    theirs = make([Pairs], lr=0.01)
    for step in range(3):
        for name, array in (("w", stage.dw), ("c", stage.dc)):
            array[...] = complex_model.drawn(array.shape, step)
            Pairs.gradients[name].reshape(-1)[:] = array.reshape(-1).view(float)
        ours.step()
        theirs.step()
    for name, array in (("w", stage.w), ("c", stage.c)):
        np.testing.assert_array_equal(array.reshape(-1).view(float), Pairs.parameters[name].reshape(-1))
    kept, states = stage.parameters.flat.copy(), copy.deepcopy(ours.named_state())
    with Mesh(comm, pipe=comm.size) as mesh:
        checkpoint.check_replicas(mesh, [stage], ours)
        path = checkpoint.save(mpi_tmp_path, mesh, [stage], ours, step=1)
        stage.parameters.flat[...] = 0
        ours.step()
        checkpoint.load(path, mesh, [stage], ours)
    np.testing.assert_array_equal(stage.parameters.flat, kept)
    for kind, arrays in ours.named_state().items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, states[kind][name])


@pytest.mark.parametrize("value", [1 + 0j, np.complex64(1), np.ones((), "complex128")])
def test_a_complex_loss_is_refused(value):
    def job(comm):
        loss = lambda y, t: (value, y)  # noqa: E731
        with Pipeline([Wave(0)], schedules.gpipe(1, 1), comm, loss=loss) as pipeline:
            pipeline.step(*complex_model.batch())

    with pytest.raises((ArgumentError, StageError), match="the value of a loss"):
        inprocess.run(1, job)


def test_layers_refuse_complex_numbers_with_a_remedy_that_exists():
    with pytest.raises(ArgumentError, match="wrong dtype") as caught:
        nn.Stage([nn.Linear(3, 3)]).forward(np.ones((2, 3), "complex64"))
    assert "real and imaginary parts" in caught.value.remedy


def test_the_mean_square_of_complex_numbers():
    y, target = complex_model.batch()
    for output in (y, y.T, y.astype("complex64")):
        wanted = target.reshape(output.shape)
        value, gradient = nn.mean_squared_error(output, wanted, factor=3.0)
        assert value == pytest.approx(np.mean(abs(output - wanted) ** 2), rel=1e-6)
        assert gradient.dtype == output.dtype and gradient.flags.c_contiguous
        np.testing.assert_allclose(gradient, 6 * (output - wanted) / output.size, rtol=1e-5)
