"""Layers for fields against PyTorch in float64, whose channels are the axis after the batch."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support.tolerance import close, largest

from mpipipe import nn

pytestmark = pytest.mark.judges
RANDOM = np.random.default_rng(6)
OPERATIONS = 200  # windows of up to 54 numbers and sums over up to 144 points
AGREE = 1e-12  # of the largest number, at most


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def conv(rank, stride=1, groups=1, circular=False, padding=1):
    def judge(torch, p, x):
        pads = [padding] * rank
        if circular:
            x, pads = torch.nn.functional.pad(x, [padding] * 2 * rank, mode="circular"), [0] * rank
        function = getattr(torch.nn.functional, f"conv{rank}d")
        return function(x, p["0.weight"].movedim(-1, 1), p["0.bias"], stride, pads, 1, groups)

    return judge


def spectral(*modes):
    """As neuraloperator has it: a product for each corner of the frequencies."""

    def judge(torch, p, x):
        axes = tuple(range(2, x.ndim))
        low, weight = torch.fft.rfftn(x, dim=axes), torch.view_as_complex(p["0.weight"])
        high = torch.zeros((len(x), weight.shape[-1], *low.shape[2:]), dtype=low.dtype)
        for ends in product([False, True], repeat=len(modes) - 1):
            here = [slice(-m, None) if end else slice(0, m) for end, m in zip((*ends, False), modes)]
            there = [slice(m, None) if end else slice(0, m) for end, m in zip((*ends, False), modes)]
            part = torch.einsum("bi...,...io->bo...", low[(slice(None), slice(None), *here)], weight[tuple(there)])
            high[(slice(None), slice(None), *here)] = part
        return torch.fft.irfftn(high, s=x.shape[2:], dim=axes)

    return judge


LAYERS = {  # layer, shape of x, the same in PyTorch
    "conv1d": (lambda: nn.Conv(4, 6, (3,)), (2, 30, 4), conv(1)),
    "conv1d, stride, groups, circular": (
        lambda: nn.Conv(4, 6, (3,), stride=2, groups=2, padding="periodic"),
        (2, 30, 4),
        conv(1, 2, 2, True),
    ),
    "conv2d": (lambda: nn.Conv(3, 5, (3, 3)), (2, 8, 9, 3), conv(2)),
    "conv2d, stride": (lambda: nn.Conv(3, 5, (3, 3), stride=2), (2, 8, 9, 3), conv(2, 2)),
    "conv2d, circular": (lambda: nn.Conv(3, 5, (3, 3), padding="periodic"), (2, 8, 9, 3), conv(2, circular=True)),
    "conv2d, a group for each channel": (lambda: nn.Conv(6, 6, (3, 3), groups=6), (2, 8, 9, 6), conv(2, groups=6)),
    "conv2d, groups, no padding": (
        lambda: nn.Conv(6, 4, (5, 5), groups=2, stride=3, padding="valid"),
        (2, 12, 9, 6),
        conv(2, 3, 2, padding=0),
    ),
    "conv3d": (lambda: nn.Conv(2, 4, (3, 3, 3)), (2, 4, 6, 5, 2), conv(3)),
    "conv3d, stride, groups, circular": (
        lambda: nn.Conv(2, 4, (3, 3, 3), stride=2, groups=2, padding="periodic"),
        (2, 4, 6, 8, 2),
        conv(3, 2, 2, True),
    ),
    "group_norm": (
        lambda: nn.GroupNorm(2, 6),
        (3, 4, 5, 6),
        lambda torch, p, x: torch.nn.functional.group_norm(x, 2, p["0.gain"], p["0.bias"], 1e-5),
    ),
    "avg_pool": (
        lambda: nn.Downsample((2, 3)),
        (2, 4, 9, 3),
        lambda torch, p, x: torch.nn.functional.avg_pool2d(x, (2, 3)),
    ),
    "interpolate": (
        lambda: nn.Upsample((2, 3)),
        (2, 4, 5, 3),
        lambda torch, p, x: torch.nn.functional.interpolate(x, scale_factor=(2.0, 3.0), mode="nearest"),
    ),
    "interpolate in space": (
        lambda: nn.Upsample((2, 1, 3)),
        (2, 2, 5, 3, 3),
        lambda torch, p, x: torch.nn.functional.interpolate(x, scale_factor=(2.0, 1.0, 3.0), mode="nearest"),
    ),
    "spectral convolution of a line": (lambda: nn.SpectralConv(3, 4, (5,)), (2, 24, 3), spectral(5)),
    "spectral convolution": (lambda: nn.SpectralConv(3, 4, (3, 4)), (2, 12, 9, 3), spectral(3, 4)),
    "spectral convolution in space": (lambda: nn.SpectralConv(2, 3, (2, 2, 3)), (1, 6, 5, 8, 2), spectral(2, 2, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_torch(torch, name):
    make, shape, judge = LAYERS[name]
    stage = nn.Stage([make()], dtype="float64")
    stage.parameters.flat += RANDOM.standard_normal(stage.parameters.flat.size) * 0.3
    x = RANDOM.standard_normal(shape)
    there = torch.tensor(x, requires_grad=True)
    p = {key: torch.tensor(array, requires_grad=True) for key, array in stage.parameters.items()}
    expected = judge(torch, p, there.movedim(-1, 1)).movedim(1, -1)
    y, saved = stage.forward(x)
    dy = RANDOM.standard_normal(y.shape)
    expected.backward(torch.tensor(dy))
    dx = stage.backward(dy, saved)
    pairs = {"output": (y, expected.detach()), "input": (dx, there.grad)}
    pairs |= {key: (stage.gradients[key], array.grad) for key, array in p.items()}
    for what, (found, right) in pairs.items():
        close(found, right.numpy(), OPERATIONS, largest(found), what=what)
        assert np.abs(found - right.numpy()).max() <= AGREE * max(1, largest(found)), what
