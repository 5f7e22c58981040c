"""Checkpoints of a training: what it learns of their time, what it says where they fail, and what it owes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mpipipe import checkpoint
from mpipipe.errors import StorageError
from mpipipe.language.config import TrainConfig
from mpipipe.train.resume import Checkpoints


class Saver:
    """Saves that become whole, or fail, when they are waited for."""

    def __init__(self, *_, **__):
        self.in_flight, self.seconds, self.saved, self.fails = False, 0.0, [], False

    def save(self, step, *_, **__):
        assert not self.in_flight
        self.in_flight = True
        self.saved.append(step)

    def poll(self):
        return None

    def wait(self, *, room_for=None):
        if not self.in_flight:
            return None
        self.in_flight = False
        if self.fails:
            raise StorageError("the disk is full")
        self.seconds = 3.5
        return Path(f"step-{self.saved[-1]}")


@pytest.fixture
def training(monkeypatch):
    """training(**options): Checkpoints whose saver is the one above, and a list of the lengths that were told."""
    monkeypatch.setattr(checkpoint, "Saver", Saver)

    def make(**options):
        config, times = TrainConfig(steps=100, **options), []
        progress = SimpleNamespace(
            pipeline=SimpleNamespace(stages=()), mesh=SimpleNamespace(rank=0), optimizer=None, step=0, state=dict
        )
        preemption = SimpleNamespace(save_took=times.append)
        return Checkpoints(config, Path("."), progress, {}, SimpleNamespace(sync=None), preemption), times

    return make


def after(checkpoints, *steps, leaves=False):
    for step in steps:
        checkpoints.progress.step = step
        checkpoints.follow(leaves)


def test_a_save_that_takes_longer_than_the_steps_between_two_is_measured_too(training):
    checkpoints, times = training(save_every=1)
    after(checkpoints, 1, 2, 3)
    assert times == [3.5, 3.5] and checkpoints.saver.saved == [1, 2, 3]
