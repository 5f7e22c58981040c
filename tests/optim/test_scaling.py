"""Scaling of the loss: the sequence of scales, steps left out on every rank, and what it is for."""

import numpy as np
import pytest

from mpipipe import nn, optim

RANDOM = np.random.default_rng(13)


def simulated(outcomes, scale, growth, backoff, interval):
    """The scale after each step, from the history of outcomes alone."""
    scales = []
    last_change = 0
    for step, finite in enumerate(outcomes, 1):
        if not finite:
            scale, last_change = max(1.0, scale * backoff), step
        elif step - last_change == interval:
            scale, last_change = min(2.0**64, scale * growth), step
        scales.append(scale)
    return scales


@pytest.mark.parametrize("growth, backoff, interval", [(2.0, 0.5, 5), (3.0, 0.25, 1), (2.0, 0.5, 2000)])
def test_the_scale_follows_overflows_and_long_calms(growth, backoff, interval):
    outcomes = np.random.default_rng(1).random(5000) > 0.15
    outcomes[2000:4500] = True
    scaler = optim.LossScaler(4096.0, growth, backoff, interval)
    found = []
    for finite in outcomes:
        scaler.update(bool(finite))
        found.append(scaler.scale)
    assert found == simulated(outcomes, 4096.0, growth, backoff, interval)
    assert scaler.skipped == int(np.sum(~outcomes))
    assert min(found) == 1.0 if interval == 2000 else max(found) == 2.0**64


def test_the_defaults_are_those_of_the_field_and_a_static_scale_stays():
    scaler, static, scales = optim.LossScaler(), optim.LossScaler(128.0, interval=2, dynamic=False), []
    for finite in [True] * 2000 + [False]:
        scaler.update(finite)
        static.update(finite)
        scales.append(scaler.scale)
    assert scales == [65536] * 1999 + [131072, 65536] and (scaler.skipped, static.scale) == (1, 128)


def test_the_step_with_which_the_scale_grows_has_the_scale_of_its_gradients():
    stage = nn.Stage([nn.RMSNorm(2)])
    optimizer, scaler = optim.SGD([stage], lr=0.5), optim.LossScaler(8.0, interval=1)
    stage.gradients.flat[...] = 8
    optim.scaled_step(optimizer, scaler)
    assert scaler.scale == 16 and stage.parameters["0.gain"].tolist() == [0.5, 0.5]
