"""A model of tanh layers whose loss counts the cells of a mask, and the same on one process in plain numpy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from support import dense

WIDTH = 3


class Tanh(dense.TanhStage):
    """y = tanh(x W), in float64, which shows its gradients."""

    def __init__(self, number):
        super().__init__(number, WIDTH, WIDTH)
        self.gradients = SimpleNamespace(flat=self.gradient.reshape(-1))


def masked(unit=1.0):
    """The mean square over the cells of a mask; without any it is NaN, with a gradient of NaN."""

    def loss(output, target):
        goal, mask = target
        with np.errstate(invalid="ignore"):
            count = np.float64(mask.sum())
            difference = (output - goal) * mask
            return (difference**2).sum() / count, 2 * difference / count, unit * count

    return loss


def masked_with_factor(unit=1.0):
    plain = masked(unit)

    def loss(output, target, factor):
        value, gradient, weight = plain(output, target)
        return value, gradient * factor, weight

    return loss


def dense_step(stages, batches):
    """(loss, gradients by stage, input gradients by batch) of all batches on one process, in plain numpy."""
    weights = [Tanh(number).weight for number in range(stages)]
    total = sum(mask.sum() for _, (_, mask) in batches)
    loss, gradients, slopes = 0.0, [np.zeros((WIDTH, WIDTH)) for _ in weights], []
    for x, (goal, mask) in batches:
        kept = [x]
        for weight in weights:
            kept.append(np.tanh(kept[-1] @ weight))
        difference = (kept[-1] - goal) * mask
        loss, dy = loss + (difference**2).sum() / total, 2 * difference / total
        for number in reversed(range(stages)):
            inner = dy * (1 - kept[number + 1] ** 2)
            gradients[number] += kept[number].reshape(-1, WIDTH).T @ inner.reshape(-1, WIDTH)
            dy = inner @ weights[number].T
        slopes.append(dy)
    return loss, gradients, slopes


def cells(rng, microbatches, length):
    """Micro-batches of one length; of some no cell counts, and of the first one all."""
    batches = []
    for number in range(microbatches):
        shape = int(rng.integers(1, 4)), length, WIDTH
        mask = rng.random(shape) < rng.choice([0, 0.2, 0.7])
        x, goal = rng.normal(size=(2, *shape))
        batches.append((x, (goal, mask | (number == 0))))
    return batches


def near(found, expected):
    assert np.linalg.norm(np.subtract(found, expected)) <= 1e-12 * max(np.linalg.norm(expected), 1e-3)
