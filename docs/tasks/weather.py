"""A transformer for the weather of a sphere: how vorticity changes in some hours, from what it is.

    d zeta / dt = -J(psi, zeta + f) - damping,  laplace psi = zeta,  f = 2 Omega sin(latitude)

the barotropic vorticity equation, in days, on a sphere of radius 1, as the earliest numerical forecasts solved it
(Charney, Fjortoft and von Neumann, 1950), here by spherical harmonics (Orszag, 1970). The file makes its data itself:

    python weather.py weather.h5
    mpiexec -n 4 python -m mpipipe train weather.py --set data=weather.h5 --pipe 2 --seq 2 --steps 400 --batch 16
"""

import sys

import h5py
import numpy as np

import mpipipe
from mpipipe import nn

WAVES = 10  # the highest degree of the harmonics
LATITUDES, LONGITUDES = 16, 32  # enough for products of two fields of these
HOURS = 6  # between two moments of the file
SCALE = 1.0  # of the vorticity, so that numbers are about 1
SINES, AREAS = np.polynomial.legendre.leggauss(LATITUDES)  # of the latitudes of Gauss, and how much of the sphere each is


# -- The solver: coefficients of vorticity (WAVES + 1 waves along a latitude, members, WAVES + 1 degrees) ---------------


def harmonics() -> tuple[np.ndarray, np.ndarray]:
    """Return normalised Legendre functions (wave, degree, latitude), and their derivatives along the sine."""
    m, n = np.mgrid[: WAVES + 1, : WAVES + 2]
    ratio = np.sqrt(np.maximum(n**2 - m**2, 0) / np.maximum(4 * n**2 - 1, 1))
    p = np.zeros((*m.shape, LATITUDES))
    for wave in range(WAVES + 1):
        p[wave, wave] = np.sqrt(0.5 * np.prod(1 + 0.5 / np.arange(1, wave + 1))) * (1 - SINES**2) ** (wave / 2)
        for degree in range(wave + 1, WAVES + 2):
            before = ratio[wave, degree - 1] * p[wave, degree - 2] if degree > wave + 1 else 0.0
            p[wave, degree] = (SINES * p[wave, degree - 1] - before) / ratio[wave, degree]
    slope = -(n[:, :-1] * ratio[:, 1:])[..., None] * p[:, 1:]
    slope[:, 1:] += ((n + 1) * ratio)[:, 1:-1, None] * p[:, :-2]
    return p[:, :-1], slope / (1 - SINES**2)


def simulate(members: int, days: int, seed: int = 0) -> np.ndarray:
    """Return vorticity (members, moments, LATITUDES, LONGITUDES) from as many random beginnings."""
    p, slope = harmonics()
    m, _, n = np.mgrid[: WAVES + 1, :1, : WAVES + 1]
    drawn = np.random.default_rng(seed).standard_normal((2, WAVES + 1, members, WAVES + 1))
    zeta = (drawn[0] + 1j * drawn[1] * (m > 0)) * (n >= m) * (n > 0) * np.exp(-((n - 4.5) ** 2) / 4) / 5

    def on_grid(coefficients, functions):
        return np.fft.irfft(coefficients @ functions, LONGITUDES, axis=0, norm="forward")

    def tendency(zeta):
        psi = zeta / -np.maximum(n * (n + 1), 1)
        of_sine = on_grid(zeta, slope) + 4 * np.pi  # the second is that of f, on a sphere that turns once a day
        jacobian = on_grid(1j * m * psi, p) * of_sine - on_grid(psi, slope) * on_grid(1j * m * zeta, p)
        waves = np.fft.rfft(jacobian, axis=0, norm="forward")[: WAVES + 1]
        return -(waves * AREAS) @ p.swapaxes(1, 2) - 2.0 * (n / WAVES) ** 8 * zeta

    moments, before = [], [tendency(zeta)] * 2
    for hour in range(24 * days + 1):
        if hour % HOURS == 0:
            moments.append(on_grid(zeta, p).transpose(1, 2, 0))
        before = [tendency(zeta), *before[:2]]
        zeta = zeta + (23 * before[0] - 16 * before[1] + 5 * before[2]) / (12 * 24)  # Adams and Bashforth
    return np.stack(moments, 1)


def write(path: str, members: int, days: int) -> None:
    """Write such data as HDF5."""
    with h5py.File(path, "w") as file:
        file["vorticity"] = simulate(members, days).astype(np.float32)


# -- The model --------------------------------------------------------------------------------------------------------


class Weather(mpipipe.train.Task):
    """The change of vorticity in some hours, from vorticity."""

    unit = "fields"
    data = "weather.h5"
    members, days = 64, 16  # of the file; the last eighth of the members is for validation
    lead = 12  # hours
    patch = 2  # points along a side
    width, heads, blocks = 48, 4, 3
    picture = ""  # file for a figure of the prediction beside the truth

    def bands(self, shard):
        """Return the rows of patches of this rank: ranks of `seq` have bands of latitude."""
        return shard.positions(LATITUDES // self.patch)

    def layers(self, shard):
        grid = LATITUDES // self.patch, LONGITUDES // self.patch
        own, size = (len(self.bands(shard)), grid[1]), (self.patch, self.patch)
        attend = shard.attend(grid[0] * grid[1])
        lift = lambda: nn.Sequential([nn.Patches(size, own), nn.Linear(4 * self.patch**2, self.width)])
        mix = lambda: nn.PreNormResidual(
            nn.LayerNorm(self.width), nn.SelfAttention(self.width, self.heads, attend=attend)
        )
        think = lambda: nn.PreNormResidual(nn.LayerNorm(self.width), nn.FeedForward(self.width, 4 * self.width))
        project = lambda: nn.Sequential(
            [nn.LayerNorm(self.width), nn.Linear(self.width, self.patch**2), nn.Patches(size, own, back=True)]
        )
        return [lift, *[mix, think] * self.blocks, project]

    def loss(self, output, target):
        error, area = output - target["change"], target["area"]
        weight = error[..., 0, 0].size // error.shape[1] * 0 + float(area.sum()) * LONGITUDES
        return float((area * error**2).sum()) / weight, 2 * area * error / weight, weight

    def batch(self, step, rows, shard):
        return self.read([self.drawn(np.random.default_rng([1, step, row]), False) for row in rows], rows, shard)

    def validation(self, index, rows, shard):
        return self.read([self.drawn(np.random.default_rng([2, index, row]), True) for row in rows], rows, shard)

    def drawn(self, generator, kept):
        """Draw a member of the training or of those that are kept from it, and a moment."""
        first = self.members - self.members // 8
        member = generator.integers(first, self.members) if kept else generator.integers(first)
        return member, generator.integers(4 * self.days + 1 - self.lead // HOURS)

    def read(self, places, rows, shard):
        """Return inputs and targets; of the file no more is read than this rank's bands of these moments."""
        bands = self.bands(shard)
        own = slice(bands[0] * self.patch, (bands[-1] + 1) * self.patch)
        now, later = np.empty((2, len(places), own.stop - own.start, LONGITUDES), np.float32)
        with h5py.File(self.data) as file:
            for place, (member, moment) in enumerate(places):
                series = file["vorticity"]
                now[place], later[place] = (
                    series[member, at, own] for at in (moment, moment + self.lead // HOURS)
                )
        east = 2 * np.pi * np.arange(LONGITUDES) / LONGITUDES
        coordinates = np.stack(np.broadcast_arrays(SINES[own, None], np.sin(east), np.cos(east)), -1)
        inputs = np.concatenate([now[..., None], np.broadcast_to(coordinates, (*now.shape, 3))], -1)
        area = np.broadcast_to(AREAS[own, None, None], (len(now), own.stop - own.start, 1, 1))
        return inputs, {"change": (later - now)[..., None], "area": area}

    def metrics(self, output, target):
        error, change = (float((target["area"] * field**2).sum()) for field in (output - target["change"], target["change"]))
        return {"of_persistence": np.sqrt(error / change)}

    def show(self, output, target, shard):
        if self.picture:
            fields = [shard.whole(field[:3, ..., 0]) for field in (output, target["change"])]
            if shard.rank == 0:
                draw(self.picture, *fields)
        return ""


def draw(path: str, output: np.ndarray, target: np.ndarray) -> None:
    """Draw predictions beside the truth, and their difference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5), layout="constrained")
    rows = [("truth", target), ("prediction", output), ("difference", output - target)]
    for place, axes in enumerate(figure.subplots(3, len(output)).flat):
        name, fields = rows[place // len(output)]
        most = abs(target).max()
        axes.imshow(fields[place % len(output)][::-1], vmin=-most, vmax=most, cmap="RdBu_r", extent=(0, 360, -90, 90))
        axes.set(xticks=[], yticks=[], ylabel=name if place % len(output) == 0 else "")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    write(sys.argv[1], Weather.members, Weather.days)
