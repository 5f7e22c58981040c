"""Gradients of the inputs that nobody asks for: they are not computed, and all others have the bits they had."""

import numpy as np
import pytest
from support import dense

from mpipipe import Branches, Pipeline, nn
from mpipipe.errors import ArgumentError
from mpipipe.schedules import gpipe, one_f_one_b, zero_bubble_h1

DIM, ROWS = 6, 4


def placed(comm, inputs, targets):
    return dense.placed(gpipe(comm.size, 1), comm.rank, inputs, targets)


class Derived(nn.Linear):
    """A class of the user's own, which reads the gradient of its input."""

    def backward_input(self, dy, saved):
        dx, pending = super().backward_input(dy, saved)
        return dx * 2, pending


LAYERS = {
    "linear": (lambda: [nn.Linear(DIM, DIM), nn.Gelu()], (ROWS, DIM)),
    "rows": (lambda: [nn.Linear(DIM, DIM), nn.Gelu()], (ROWS, 3, DIM)),
    "derived": (lambda: [Derived(DIM, DIM), nn.Gelu()], (ROWS, DIM)),
    "convolution": (lambda: [nn.Conv(3, DIM, (3, 3)), nn.Gelu()], (ROWS, 5, 5, 3)),
    "strided": (lambda: [nn.Conv(3, DIM, (2, 2), stride=2), nn.Gelu()], (ROWS, 6, 6, 3)),
    "patches": (lambda: [nn.Patches((2, 2), (2, 3)), nn.Linear(4, DIM), nn.Gelu()], (ROWS, 4, 6, 1)),
    "frozen below": (lambda: [nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)], (ROWS, DIM)),
    "kept": (lambda: [nn.Linear(DIM, DIM), nn.Keep("arm"), nn.Linear(DIM, DIM), nn.Join("arm", None)], (ROWS, DIM)),
    "side": (lambda: [nn.Linear(DIM, DIM), nn.AdaptiveNorm(DIM, 2, "time")], (ROWS, DIM)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("make_schedule", [one_f_one_b, zero_bubble_h1])
def test_gradients_of_parameters_have_the_bits_that_they_have_beside_those_of_the_inputs(comm, make_schedule, name):
    make, shape = LAYERS[name]
    random = np.random.default_rng(0)
    x, time = random.normal(size=shape), random.normal(size=(ROWS, 2))
    inputs = Branches(x, time=time) if name == "side" else x
    results, gradients = [], []
    for asked in (True, False):
        frozen = ["0.*"] if name == "frozen below" else []
        first = nn.Stage(make(), "float64", seed=1, frozen=frozen)
        target = np.zeros_like(first.forward(inputs)[0])
        stage = first if comm.rank == 0 else nn.Stage([nn.Linear(DIM, DIM)], "float64", seed=2)
        given = placed(comm, inputs, target)
        options = dict(loss=nn.mean_squared_error, input_grads=asked)
        with Pipeline([stage], make_schedule(comm.size, 2), comm, **options) as pipeline:
            results.append(pipeline.step(*given))
        gradients.append(stage.gradients.flat.copy())
    assert results[0].losses == results[1].losses
    assert gradients[0].any()
    np.testing.assert_array_equal(*gradients)
    assert (results[0].input_grads is None) == (comm.rank > 0)
    with pytest.raises(ArgumentError, match="not computed") as caught:
        _ = results[1].input_grads
    assert "input_grads=True" in caught.value.remedy
    assert "loss=" in repr(results[1])


@pytest.mark.parametrize("name", ["linear", "convolution", "patches"])
def test_the_first_product_and_what_is_below_it_are_left_out(monkeypatch, name):
    make, shape = LAYERS[name]
    stage, calls = nn.Stage(make(), "float64"), []
    for owner, method in ((stage.kernels, "linear_backward_input"), (nn.Patches, "_move")):
        whole = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *a, whole=whole, method=method: calls.append(method) or whole(*a))
    for ends in (False, True, False):
        stage.end_backward(ends)
        y, saved = stage.forward(np.ones(shape))
        calls.clear()
        dx = stage.backward(np.ones_like(y), saved)
        assert (dx is None) == ends == ("linear_backward_input" not in calls)
        assert calls.count("_move") == (name == "patches" and not ends)


def test_pipelines_that_share_a_stage_do_not_disturb_each_other(comm):
    """Neither in a step nor with gradients from outside."""
    schedule, stage, x = gpipe(comm.size, 2), nn.Stage([nn.Linear(DIM, DIM)], "float64"), np.ones((ROWS, DIM))
    given, gradients, of_inputs = placed(comm, x, 0 * x), [], []
    with (
        Pipeline([stage], schedule, comm, nn.mean_squared_error) as asks,
        Pipeline([stage], schedule, comm, nn.mean_squared_error, input_grads=False) as other,
    ):
        for pipeline in (asks, other, asks):
            result, y = pipeline.step(*given), pipeline.forward_train(given[0])
            found = pipeline.backward(None if y is None else y / y.size)
            assert (found is not None) == (pipeline is asks and comm.rank == 0)
            gradients.append(stage.gradients.flat.copy())
            if pipeline is asks:
                of_inputs.append(result.input_grads)
                continue
            with pytest.raises(ArgumentError, match="not computed"):
                _ = result.input_grads
    np.testing.assert_array_equal(gradients, [gradients[0]] * 3)
    assert (of_inputs[0] is not None) == (comm.rank == 0)
    if comm.rank == 0:
        np.testing.assert_array_equal(*of_inputs)
        assert all(part.any() for part in of_inputs[0])
