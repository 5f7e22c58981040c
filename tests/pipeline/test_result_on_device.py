"""The loss and the norm of a step on a GPU: nothing waits for them before they are read."""

import math

import numpy as np
import pytest

from mpipipe import Pipeline, arrays, nn, optim
from mpipipe.errors import NonFiniteError
from mpipipe.job import inprocess
from mpipipe.schedules import gpipe


def losses_of(device, steps=3, bad_step=None, reads_each=True, synchronisations=None):
    """The losses and norms of a small training, read after each step or at its end."""
    x = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)

    def body(comm):
        stage = nn.Stage([nn.Linear(5, 5)], device=device)
        optimizer, scaler = optim.AdamW([stage], 0.1), optim.LossScaler(1.0, dynamic=False)
        kept, values = [], []
        with Pipeline([stage], gpipe(1, 2), comm, nn.mean_squared_error) as pipeline:
            for step in range(steps):
                before = 0 if synchronisations is None else len(synchronisations)
                batch = x * math.inf if step == bad_step else x
                result = pipeline.step(batch, x)
                norm = optim.scaled_step(optimizer, scaler, 1.0)
                if synchronisations is not None:
                    kept.append(len(synchronisations) - before)
                values.append((result, norm))
                if reads_each:
                    values[-1] = result.loss, float(norm)
            values = [(result, norm) if reads_each else (result.loss, float(norm)) for result, norm in values]
        return values, kept

    ((values, kept),) = inprocess.run(1, body)
    return values, kept


def test_a_step_waits_for_nothing_and_its_loss_and_norm_can_be_read_later(emulated_gpu):
    expected, _ = losses_of("cpu")
    at_once, _ = losses_of("cuda")
    later, waits = losses_of("cuda", reads_each=False, synchronisations=emulated_gpu.synchronisations)
    assert waits == [0, 0, 0]
    assert later == at_once
    np.testing.assert_allclose(later, expected, rtol=1e-5)


@pytest.mark.parametrize("reads_each", [True, False])
def test_a_loss_that_is_not_finite_names_the_step_in_which_it_arose(gpu, reads_each):
    with pytest.raises(NonFiniteError, match=r"the loss is not finite in step \(call 2\) of pipeline 1"):
        losses_of("cuda", steps=4, bad_step=1, reads_each=reads_each)


def test_a_loss_that_nobody_reads_is_found_at_the_end(gpu):
    x = np.full((8, 5), math.inf, np.float32)

    def body(comm):
        with Pipeline(
            [nn.Stage([nn.Linear(5, 5)], device="cuda")], gpipe(1, 2), comm, nn.mean_squared_error
        ) as pipeline:
            pipeline.step(x, x)

    with pytest.raises(NonFiniteError, match=r"in step \(call 1\)"):
        inprocess.run(1, body)


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
