"""Skips between stages on a GPU: the gradients of the host, by every way of sending, with and without order."""

from __future__ import annotations

import pytest
from support import dense
from support.tolerance import close_norm

from mpipipe import Branches, Pipeline, arrays, nn
from mpipipe.schedules import with_skips

WIDTH, ROWS = 8, 4
SKIPS = {4: {"outer": (0, 3), "low": (0, 2), "high": (1, 3)}, 8: {"outer": (0, 7), "inner": (1, 6), "wide": (0, 5)}}


class Around:
    """An nn.Stage whose input is the sum of what comes in, and whose output goes on, and over all skips out of it.

    Over skips it goes in halves, and a quarter of them is added: so no two messages of an action are alike.
    """

    def __init__(self, schedule, number, device):
        self.inner = nn.Stage([nn.Linear(WIDTH, WIDTH), nn.Gelu()], "float64", seed=3, first=2 * number, device=device)
        self.inner_stages = [self.inner]
        self.gives = [skip.name for skip in schedule.skips if skip.source == number]
        self.takes = [skip.name for skip in schedule.skips if skip.target == number]

    def _sum(self, tree, names, factor):
        total, kernels = tree.main if names else tree, self.inner.kernels
        for name in names:
            total = kernels.add(total, kernels.scale(tree[name], factor))
        return total

    def _shared(self, tree, names, factor):
        return Branches(tree, **{name: self.inner.kernels.scale(tree, factor) for name in names}) if names else tree

    def forward(self, x):
        y, saved = self.inner.forward(self._sum(x, self.takes, 0.25))
        return self._shared(y, self.gives, 0.5), saved

    def backward(self, dy, saved):
        return self._shared(self.inner.backward(self._sum(dy, self.gives, 0.5), saved), self.takes, 0.25)

    def backward_input(self, dy, saved):
        dx, pending = self.inner.backward_input(self._sum(dy, self.gives, 0.5), saved)
        return self._shared(dx, self.takes, 0.25), pending

    def backward_weight(self, pending):
        self.inner.backward_weight(pending)


def gradients(comm, name, device, recompute=False):
    chunks = {1: 4, 2: 2}.get(comm.size, 2)
    schedule = dense.build(name, comm.size, chunks, 4)
    schedule = with_skips(schedule, SKIPS[schedule.stages])
    stages = [Around(schedule, number, device) for number in schedule.stages_of(comm.rank)]
    x, target = dense.batch(4 * ROWS, 7)
    x, target = (each.repeat(4, axis=1)[:, :WIDTH].copy() for each in (x, target))
    with Pipeline(stages, schedule, comm, loss=nn.mean_squared_error, recompute=recompute) as pipeline:
        for _ in range(3):
            result = pipeline.step(*dense.placed(schedule, comm.rank, x, target))
    return {
        key: arrays.download(each.inner.gradients[key]) for each in stages for key in each.inner.gradients
    }, result.loss  # fmt: skip


NAMES = ["interleaved_1f1b", "interleaved_zero_bubble"]


def near(found, expected):
    close_norm(found[1], expected[1], 64, "float64", "the loss")
    assert found[0].keys() == expected[0].keys()
    for key in found[0]:
        close_norm(found[0][key], expected[0][key], 1024, "float64", key)


@pytest.mark.parametrize("name, direct", zip(NAMES, "10", strict=True))
def test_gradients_equal_those_of_the_host(emulated_gpu, comm, monkeypatch, name, direct):
    if comm.size not in (1, 2, 4):
        return
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", direct)
    expected = gradients(comm, name, "cpu")
    for recompute in (False, True):
        near(gradients(comm, name, "cuda", recompute), expected)
