"""A U-Net of PyTorch modules for the vorticity of a fluid: what it is a moment later,
from what it is now.

    dw/dt + u dw/dx + v dw/dy = VISCOSITY (d2w/dx2 + d2w/dy2)

in a periodic square, where (u, v) is the velocity of w

The form of the network is that of Ronneberger, Fischer and Brox, "U-Net: convolutional
networks for biomedical image segmentation" (2015), with a group normalisation after
each convolution. Each arm of the U is a skip between stages.

    mpiexec -n 4 python -m mpipipe train unet.py --pipe 2 --steps 200 \\
        --batch 16 --lr 4e-3 --set picture=unet.png
"""

from functools import lru_cache

import numpy as np
import torch
from torch import nn

import mpipipe
from mpipipe import adapters

POINTS = 32  # along a side
KEPT = 32  # samples for validation
# The moment is as long as so many steps of the solver
VISCOSITY, MOMENT, TURNS = (1e-3, 1.0, 24)


def eddies(generator: np.random.Generator, samples: int) -> np.ndarray:
    """Draw vorticities (samples, POINTS, POINTS) of random eddies; mean square 1."""
    k = np.fft.fftfreq(POINTS, 1 / POINTS)
    size = np.hypot(k[:, None], k)
    noise = np.fft.fft2(generator.standard_normal((samples, POINTS, POINTS)))
    smooth = np.fft.ifft2(noise * size * np.exp(-((size / 4) ** 2))).real
    return smooth / smooth.std(axis=(1, 2), keepdims=True)


def later(vorticity: np.ndarray) -> np.ndarray:
    """Return vorticities a moment later, by Fourier series.

    The time is stepped by the midpoint rule, with friction by its exponential.
    """
    kx, ky = np.fft.fftfreq(POINTS, 1 / POINTS)[:, None], np.arange(POINTS // 2 + 1)
    square = kx**2 + ky**2
    stream = 1 / np.maximum(square, 1)  # of a vorticity whose mean is 0
    # Of the velocity, and of itself
    slopes = 1j * np.stack([ky * stream, -kx * stream, kx + 0 * ky, ky + 0 * kx])
    # Products of these alone are exact
    kept = (np.abs(kx) < POINTS / 3) & (ky < POINTS / 3)
    step = MOMENT / TURNS
    friction = np.exp(-VISCOSITY * square * step / 2)

    def change(wave):
        u, v, along, across = (np.fft.irfft2(slope * wave) for slope in slopes)
        return np.where(kept, -np.fft.rfft2(u * along + v * across), 0)

    wave = np.fft.rfft2(vorticity)
    for _ in range(TURNS):
        middle = friction * (wave + step / 2 * change(wave))
        wave = friction * (friction * wave + step * change(middle))
    return np.fft.irfft2(wave)


@lru_cache(maxsize=1)
def data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Make vorticities now and a moment later, both (samples, 1, POINTS, POINTS)."""
    now = eddies(np.random.default_rng(0), samples)
    return now[:, None], later(now)[:, None]


class Twice(nn.Sequential):
    """Two convolutions, each with a normalisation and a nonlinearity."""

    def __init__(self, channels: int, width: int):
        super().__init__(*self.once(channels, width), *self.once(width, width))

    def once(self, channels: int, width: int) -> list[nn.Module]:
        """Make one of them."""
        mixed = nn.Conv2d(channels, width, 3, padding=1, padding_mode="circular")
        return [mixed, nn.GroupNorm(4, width), nn.GELU()]


class Down(Twice):
    """Half as many points; what there was before goes on as an arm."""

    def forward(self, x):
        arm = super().forward(x)
        return nn.functional.avg_pool2d(arm, 2), arm


class Up(Twice):
    """Twice as many points, together with those of an arm."""

    def forward(self, x, arm):
        fine = nn.functional.interpolate(x, scale_factor=2)
        return super().forward(torch.cat([fine, arm], dim=1))


class UNet(mpipipe.train.Task):
    """The vorticity a moment later, from that of now."""

    unit = "fields"
    width = 16  # channels of the finest level; each coarser one has twice as many
    samples = 544
    picture = ""  # file for a figure of the prediction beside the truth
    loss = adapters.torch_loss(nn.functional.mse_loss)

    def layers(self, shard):
        w, skips = self.width, adapters.with_skips
        return [
            skips(lambda: Down(1, w), gives=("fine",)),
            skips(lambda: Down(w, 2 * w), gives=("coarse",)),
            lambda: Twice(2 * w, 4 * w),
            skips(lambda: Up(4 * w + 2 * w, 2 * w), takes=("coarse",)),
            skips(lambda: Up(2 * w + w, w), takes=("fine",)),
            lambda: nn.Conv2d(w, 1, 1),
        ]

    def batch(self, step, rows, shard):
        picked = np.random.default_rng([1, step]).permutation(self.samples - KEPT)[rows]
        return tuple(array[picked] for array in data(self.samples))

    def validation(self, index, rows, shard):
        return tuple(array[-KEPT:][rows] for array in data(self.samples))

    def metrics(self, output, target):
        away, size = (
            np.sum(field**2, axis=(1, 2, 3)) for field in (output - target, target)
        )
        return {"relative_error": float(np.mean(np.sqrt(away / size)))}

    def show(self, output, target, shard):
        if self.picture:
            now = data(self.samples)[0][-KEPT:]
            draw(
                self.picture,
                {"now": now, "a moment later": target, "prediction": output},
            )
        error = self.metrics(output[:3], target[:3])["relative_error"]
        return f"relative error of the first fields: {error:.3f}"


def draw(path: str, rows: dict[str, np.ndarray]) -> None:
    """Draw the first three fields of each row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 6.4), layout="constrained")
    for line, (name, fields) in zip(figure.subplots(len(rows), 3), rows.items()):
        for axes, field in zip(line, fields[:3, 0]):
            axes.imshow(field, vmin=-3, vmax=3, cmap="RdBu_r")
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(name)
    figure.savefig(path, dpi=80)
