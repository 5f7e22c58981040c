"""The loss and the norm of a step on a GPU: nothing waits for them before they are read."""

import math

import numpy as np
import pytest

from mpipipe import Pipeline, arrays, nn, optim
from mpipipe.errors import NonFiniteError
from mpipipe.job import inprocess
from mpipipe.schedules import gpipe


def losses_of(device, steps=3, bad_step=None, reads="each", waits=()):
    """The losses and norms of a small training, read after each step, later or never, and how often each one waited."""
    x = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)

    def body(comm):
        stage = nn.Stage([nn.Linear(5, 5)], device=device)
        optimizer, scaler = optim.AdamW([stage], 0.1), optim.LossScaler(1.0, dynamic=False)
        counts, values = [], []
        with Pipeline([stage], gpipe(1, 2), comm, nn.mean_squared_error) as pipeline:
            for step in range(steps):
                before = len(waits)
                result = pipeline.step(x * math.inf if step == bad_step else x, x)
                norm = optim.scaled_step(optimizer, scaler, 1.0) if reads != "never" else None
                counts.append(len(waits) - before)
                values.append((result.loss, float(norm)) if reads == "each" else (result, norm))
            if reads == "later":
                values = [(result.loss, float(norm)) for result, norm in values]
        return values, counts

    return inprocess.run(1, body)[0]


def test_a_step_waits_for_nothing_and_its_loss_and_norm_can_be_read_later(emulated_gpu):
    expected, _ = losses_of("cpu")
    at_once, _ = losses_of("cuda")
    later, waits = losses_of("cuda", reads="later", waits=emulated_gpu.synchronisations)
    assert waits == [0, 0, 0]
    assert later == at_once
    np.testing.assert_allclose(later, expected, rtol=1e-5)


@pytest.mark.parametrize("reads, steps", [("each", 4), ("later", 4), ("never", 2)])
def test_a_loss_that_is_not_finite_names_the_step_in_which_it_arose(gpu, reads, steps):
    with pytest.raises(NonFiniteError, match=r"the loss is not finite in step \(call 2\) of pipeline 1"):
        losses_of("cuda", steps, bad_step=1, reads=reads)


def test_a_norm_that_is_not_finite_leaves_the_step_out_and_names_it_when_it_is_read(gpu):
    stage = nn.Stage([nn.Linear(5, 5)], device="cuda")
    before = arrays.download(stage.parameters.flat)
    optimizer, scaler = optim.SGD([stage], 0.1), optim.LossScaler(1.0, dynamic=False)
    arrays.copy_into(stage.gradients.flat, arrays.upload(np.full(before.size, math.nan, np.float32)))
    norm = optim.scaled_step(optimizer, scaler, 1.0)
    np.testing.assert_array_equal(arrays.download(stage.parameters.flat), before)
    with pytest.raises(NonFiniteError, match=r"parameter 0\.\w+ is not finite in step 1 of the optimizer"):
        float(norm)
    arrays.copy_into(stage.gradients.flat, arrays.upload(np.ones(before.size, np.float32)))
    with pytest.raises(NonFiniteError, match="in step 1 of the optimizer"):
        optim.scaled_step(optimizer, scaler, 1.0)
