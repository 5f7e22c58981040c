"""Optimizers and norms of stages of a user's own: the arithmetic is that of an nn.Stage with the same numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from support.tolerance import close

from mpipipe import arrays, nn, optim
from mpipipe.errors import ArgumentError, NonFiniteError

SHAPES = {"w": (5, 3), "gain": (7,), "v": (2, 2)}


def own(dtype="float64", seed=0):
    """A stage with buffers alone."""
    rng = np.random.default_rng(seed)
    stage = SimpleNamespace(parameters=nn.FlatBuffer(SHAPES, dtype), gradients=nn.FlatBuffer(SHAPES, dtype))
    for name, shape in SHAPES.items():
        stage.parameters[name][...], stage.gradients[name][...] = rng.normal(size=(2, *shape))
    return stage


def without_names(stage):
    return SimpleNamespace(
        parameters=SimpleNamespace(flat=stage.parameters.flat), gradients=SimpleNamespace(flat=stage.gradients.flat)
    )


def adamw(p, g, steps, rate, decay, betas=(0.9, 0.95), eps=1e-8):
    """Loshchilov and Hutter, algorithm 2, with a gradient that stays."""
    m = v = np.zeros_like(p)
    for t in range(1, steps + 1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        p = p - rate * decay * p
        p = p - rate * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return p


def test_adamw_decays_matrices_and_no_vectors():
    stage = own()
    start = {name: array.copy() for name, array in stage.parameters.items()}
    optimizer = optim.AdamW([stage], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.step()
    for name, shape in SHAPES.items():
        expected = adamw(start[name], stage.gradients[name], 3, 0.1, 0.5 if len(shape) > 1 else 0.0)
        np.testing.assert_allclose(stage.parameters[name], expected, rtol=1e-13, atol=1e-13)  # 30 operations of 1
    assert set(optimizer.named_state()["first"]) == {*SHAPES}
    assert {name: array.shape for name, array in optimizer.named_state()["second"].items()} == SHAPES


def test_sgd_without_names_decays_everything():
    stage = own()
    p, g = stage.parameters.flat.copy(), stage.gradients.flat.copy()
    optimizer = optim.SGD([without_names(stage)], lr=0.5, momentum=0.5, weight_decay=0.25)
    optimizer.step()
    np.testing.assert_allclose(stage.parameters.flat, p - 0.5 * (g + 0.25 * p), rtol=1e-15)
    assert set(optimizer.named_state()["momentum"]) == {"flat"}


def test_ranges_of_decay_may_be_the_stages_own():
    stage = own()
    before = stage.parameters["v"].copy()
    stage.decay_ranges = [(0, stage.parameters.flat.size, False)]
    stage.gradients.flat[...] = 0
    optim.AdamW([stage], lr=0.1, weight_decay=0.5).step()
    np.testing.assert_array_equal(stage.parameters["v"], before)


def test_the_norm_counts_users_stages_and_those_of_layers_together(subcomm):
    pair = subcomm(2)
    if pair is None:
        return
    layers = nn.Stage([nn.Linear(3, 3)], dtype="float64", first=pair.rank)
    layers.gradients.flat[...] = 1 + pair.rank
    mine = own(seed=pair.rank)
    numbers = [own(seed=rank).gradients.flat for rank in range(2)]
    square = sum(float((x**2).sum()) for x in numbers) + 12 * (1 + 4)
    expected = math.sqrt(square)
    assert optim.gradient_norm([layers, mine], pair) == pytest.approx(expected, rel=1e-14)
    with optim.GlobalNorm([layers, mine], pair) as over:
        assert optim.clip_by_global_norm([layers, mine], 1.0, over=over) == pytest.approx(expected, rel=1e-14)
    assert optim.gradient_norm([layers, mine], pair) == pytest.approx(1.0, rel=1e-14)


def test_a_gradient_that_is_no_number_is_named_with_its_stage():
    stage = own()
    stage.index = 3
    stage.gradients["gain"][2] = np.nan
    with pytest.raises(NonFiniteError, match="gain is not finite") as caught:
        optim.clip_by_global_norm([stage], 1.0)
    assert caught.value.stage == 3
    with pytest.raises(NonFiniteError, match="parameter flat is"):
        optim.clip_by_global_norm([without_names(stage)], 1.0)


def test_parameters_may_be_skipped_by_name():
    stage = own()
    expected = np.sqrt(sum((stage.gradients[name] ** 2).sum() for name in ("w", "v")))
    assert optim.gradient_norm([stage], skip={"gain"}) == pytest.approx(expected, rel=1e-14)


def test_a_scaled_step_takes_a_users_stage():
    stage = own()
    p, g = stage.parameters.flat.copy(), stage.gradients.flat.copy()
    stage.gradients.flat[...] = 8 * g
    scaler = optim.LossScaler(initial=8.0)
    optim.scaled_step(optim.SGD([stage], lr=0.5), scaler)
    np.testing.assert_array_equal(stage.parameters.flat, p - 0.5 * g)


def test_a_step_is_announced_to_those_who_read():
    stage, heard = own(), []
    stage.before_write = [lambda: heard.append(stage.parameters.flat.copy())]
    before = stage.parameters.flat.copy()
    optim.AdamW([stage], lr=0.1).step()
    np.testing.assert_array_equal(heard, [before])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_in_half_precision_are_measured_and_not_updated(dtype):
    stage = own(dtype)
    wide = stage.gradients.flat.astype(np.float64)
    assert optim.gradient_norm([stage]) == pytest.approx(float(np.sqrt((wide**2).sum())), rel=1e-14)
    for make in (optim.AdamW, optim.SGD):
        with pytest.raises(ArgumentError, match=f"in {dtype}") as caught:
            make([stage], lr=0.1)
        assert "float32" in caught.value.remedy


def test_a_stage_without_parameters_takes_part_in_nothing():
    bare = SimpleNamespace(gradients=None)
    optimizer = optim.AdamW([bare, own()], lr=0.1)
    optimizer.step()
    assert optim.gradient_norm([bare]) == 0.0


@pytest.mark.parametrize(
    "stage, match",
    [
        (SimpleNamespace(), "without flat parameters"),
        (SimpleNamespace(parameters=SimpleNamespace(flat=np.zeros(3)), gradients=None), "without a one-dimensional"),
        (SimpleNamespace(parameters=None, gradients=SimpleNamespace(flat=np.zeros(3))), "without a one-dimensional"),
    ],
)
def test_a_stage_that_cannot_be_updated_is_refused(stage, match):
    with pytest.raises(ArgumentError, match=match):
        optim.SGD([stage], lr=0.1)


def test_a_stage_on_a_gpu_is_clipped_and_updated_there(gpu):
    """The norm stays on the device, and the update is that of the host up to the rounding of float32."""
    host, there = own("float32"), SimpleNamespace()
    there.parameters, there.gradients = (nn.FlatBuffer(SHAPES, "float32", "cuda") for _ in range(2))
    arrays.upload(host.parameters.flat, out=there.parameters.flat)
    arrays.upload(host.gradients.flat, out=there.gradients.flat)
    assert optim.GlobalNorm([there]).on_device and not optim.GlobalNorm([host]).on_device
    norms = [optim.clip_by_global_norm([stage], 0.5) for stage in (host, there)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)
    for stage in (host, there):
        optimizer = optim.AdamW([stage], lr=0.1)
        optimizer.step()
        optimizer.step()
    found = arrays.download(there.parameters.flat)
    close(found, host.parameters.flat, terms=40, size=1 + np.abs(host.parameters.flat))
