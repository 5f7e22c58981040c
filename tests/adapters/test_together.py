"""A pipeline whose first half is PyTorch and whose second half is JAX, and one with layers of mpipipe in between."""

from __future__ import annotations

import numpy as np
import pytest

torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
from support import dense, jax_models, torch_models  # noqa: E402

from mpipipe import Pipeline, adapters, nn, optim  # noqa: E402

pytestmark = pytest.mark.judges
WIDTH = jax_models.WIDTH


def model(stages):
    """(kind, what it is made of) of each stage: PyTorch, one of mpipipe's own where there are more than two, JAX."""
    torch.manual_seed(2)
    half, parameters = stages // 2, jax_models.parameters(stages)
    made = []
    for number in range(stages):
        if number == 1 and stages > 2:
            made.append(nn.Stage([nn.Linear(WIDTH, WIDTH), nn.Gelu()], dtype="float64", first=number))
        elif number < half:
            made.append(torch_models.Block(WIDTH, 2).double())
        else:
            made.append(parameters[number])
    return made


@pytest.mark.parametrize("name, chunks", [("one_f_one_b", 1), ("interleaved_1f1b", 2), ("zero_bubble_h1", 1)])
@pytest.mark.parametrize("loss", ["jax", "torch"])
def test_gradients_go_through_all_of_them(comm, name, chunks, loss):
    schedule = dense.build(name, comm.size, chunks, 4)
    made, half = model(schedule.stages), schedule.stages // 2
    x, target = np.random.default_rng(1).normal(size=(2, 8, 5, WIDTH))

    def stage_of(number, each):
        if isinstance(each, nn.Stage):
            return each
        if number < half:
            return adapters.torch_stage(each, prefix=f"{number}.")
        return adapters.jax_stage(jax_models.layer, each, prefix=f"{number}.")

    stages = [stage_of(number, made[number]) for number in schedule.stages_of(comm.rank)]
    square = {
        "jax": adapters.jax_loss(jax_models.squared_error),
        "torch": adapters.torch_loss(torch.nn.functional.mse_loss),
    }[loss]
    with Pipeline(stages, schedule, comm, loss=square) as pipeline:
        result = pipeline.step(*dense.placed(schedule, comm.rank, x, target))
    norm = optim.gradient_norm(stages, comm)

    whole = [stage_of(number, each) for number, each in enumerate(model(schedule.stages))]  # one after the other
    y, kept = x, []
    for stage in whole:
        y, saved = stage.forward(y)
        kept.append(saved)
    value, dy = nn.mean_squared_error(np.asarray(y), target)
    for stage, saved in zip(whole[::-1], kept[::-1]):
        dy = stage.backward(dy, saved)
    assert abs(result.loss - value) < 1e-12
    for number, stage in zip(schedule.stages_of(comm.rank), stages):
        np.testing.assert_allclose(stage.gradients.flat, whole[number].gradients.flat, rtol=1e-10, atol=1e-12)
    assert norm == pytest.approx(optim.gradient_norm(whole), rel=1e-10)
    if result.input_grads is not None:
        np.testing.assert_allclose(np.concatenate(result.input_grads), dy, rtol=1e-10, atol=1e-12)
