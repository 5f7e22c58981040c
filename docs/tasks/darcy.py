"""A Fourier neural operator for Darcy flow: the pressure of water in rock of two kinds,
from the permeability alone.

    -div(a grad u) = 1 in the unit square, u = 0 on its edge

as in section 5.2 of Li et al., "Fourier neural operator for parametric partial
differential equations" (2021).

    mpiexec -n 4 python -m mpipipe train darcy.py --pipe 2 --steps 300 \\
        --batch 16 --lr 4e-3 --set picture=darcy.png
"""

from functools import lru_cache

import numpy as np

import mpipipe
from mpipipe import nn

POINTS = 20  # along a side, without the edge
KEPT = 32  # samples for validation
SCALE = 20.0  # of the pressure, so that numbers are about 1


def rock(generator: np.random.Generator) -> np.ndarray:
    """Draw a permeability (POINTS, POINTS): 12 or 3, by the sign of a smooth field."""
    k = np.fft.fftfreq(POINTS, 1 / POINTS)
    damping = (k[:, None] ** 2 + k**2 + 9.0) ** -1.5
    smooth = np.fft.ifft2(
        np.fft.fft2(generator.standard_normal((POINTS, POINTS))) * damping
    ).real
    return np.where(smooth > 0, 12.0, 3.0)


def pressure(a: np.ndarray) -> np.ndarray:
    """Solve for the pressure at the points of a permeability by finite differences.

    The stencil has five points. Between two points counts the harmonic mean of their
    permeabilities. Beyond the edge the pressure is 0.
    """
    n, wide = len(a), np.pad(a, 1, mode="edge")
    index = np.arange(n * n).reshape(n, n)
    there = np.pad(index, 1, constant_values=-1)
    matrix = np.zeros((n * n, n * n))
    for shift in np.array([[0, 1], [2, 1], [1, 0], [1, 2]]):
        beside = tuple(slice(start, start + n) for start in shift)
        between = 2 * a * wide[beside] / (a + wide[beside])
        inside = there[beside] >= 0
        matrix[index, index] += between
        matrix[index[inside], there[beside][inside]] -= between[inside]
    return np.linalg.solve(matrix, np.full(n * n, (n + 1.0) ** -2)).reshape(n, n)


@lru_cache(maxsize=1)
def data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Make inputs (samples, POINTS, POINTS, 3) and targets (..., 1) in some seconds.

    The inputs are permeability and coordinates.
    """
    generator = np.random.default_rng(0)
    place = np.linspace(0, 1, POINTS + 2)[1:-1]
    rocks = np.stack([rock(generator) for _ in range(samples)])
    pressures = np.stack([pressure(a) for a in rocks])
    coordinates = np.broadcast_to(
        np.stack(np.meshgrid(place, place, indexing="ij"), -1), (*rocks.shape, 2)
    )
    return np.concatenate(
        [(rocks[..., None] - 7.5) / 4.5, coordinates], axis=-1
    ), SCALE * pressures[..., None]


class Darcy(mpipipe.train.Task):
    """Pressure from permeability."""

    unit = "fields"
    width = 24  # channels between the layers
    modes = 8  # frequencies that a Fourier layer keeps
    blocks = 4
    samples = 544
    picture = ""  # file for a figure of the prediction beside the truth

    def block(self):
        """Make a Fourier layer: x + a spectral convolution and a product of x."""
        mixed = nn.SpectralConv(self.width, self.width, (self.modes, self.modes))
        return nn.Residual(
            nn.Sequential([mixed, nn.Gelu(), nn.Linear(self.width, self.width)])
        )

    def layers(self, shard):
        return [
            lambda: nn.Linear(3, self.width),
            *[self.block] * self.blocks,
            lambda: nn.FeedForward(self.width, 4 * self.width),
            lambda: nn.Linear(self.width, 1),
        ]

    def loss(self, output, target):
        return nn.mean_squared_error(output, target)

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
            draw(self.picture, output[:3, ..., 0], target[:3, ..., 0])
        error = self.metrics(output[:3], target[:3])["relative_error"]
        return f"relative error of the first fields: {error:.3f}"


def draw(path: str, output: np.ndarray, target: np.ndarray) -> None:
    """Draw predictions beside the truth, and their difference ten times as large."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 6.4), layout="constrained")
    rows = [
        ("truth", target, 1),
        ("prediction", output, 1),
        ("difference x 10", output - target, 10),
    ]
    for place, axes in enumerate(figure.subplots(3, len(output)).flat):
        name, fields, factor = rows[place // len(output)]
        axes.imshow(
            factor * fields[place % len(output)],
            vmin=-target.max(),
            vmax=target.max(),
            cmap="RdBu_r",
        )
        axes.set(xticks=[], yticks=[], ylabel=name if place % len(output) == 0 else "")
    figure.savefig(path, dpi=80)
