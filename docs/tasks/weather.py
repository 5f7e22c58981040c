"""A transformer for the weather of a sphere: how vorticity changes in some hours, from
what it is.

    d zeta / dt = -J(psi, zeta + f) - damping
    laplace psi = zeta,  f = 2 Omega sin(latitude)

the barotropic vorticity equation, in days, on a sphere of radius 1, as the earliest
numerical forecasts solved it (Charney, Fjortoft and von Neumann, 1950), here by
spherical harmonics (Orszag, 1970). The file makes its data itself:

    python weather.py weather.h5
    mpiexec -n 4 python -m mpipipe train weather.py --set data=weather.h5 \\
        --pipe 2 --seq 2 --steps 200 --batch 16
"""

import math
import sys

import h5py
import numpy as np

import mpipipe
from mpipipe import nn
from mpipipe.errors import DataError

WAVES = 10  # the highest degree of the harmonics
LATITUDES, LONGITUDES = 16, 32  # enough for products of two fields of these
HOURS = 6  # between two moments of the file
# Of latitudes, by Gauss: sines, and shares of the sphere
SINES, AREAS = np.polynomial.legendre.leggauss(LATITUDES)


# -- The solver, on coefficients of vorticity ------------------------------------------
#
# Their shape is (WAVES + 1 waves along a latitude, members, WAVES + 1 degrees).


def harmonics() -> tuple[np.ndarray, np.ndarray]:
    """Return normalised Legendre functions (wave, degree, latitude) and derivatives.

    The derivatives are along the sine of the latitude.
    """
    m, n = np.mgrid[: WAVES + 1, : WAVES + 2]
    ratio = np.sqrt(np.maximum(n**2 - m**2, 0) / np.maximum(4 * n**2 - 1, 1))
    p = np.zeros((*m.shape, LATITUDES))
    for wave in range(WAVES + 1):
        p[wave, wave] = np.sqrt(0.5 * np.prod(1 + 0.5 / np.arange(1, wave + 1))) * (
            1 - SINES**2
        ) ** (wave / 2)
        for degree in range(wave + 1, WAVES + 2):
            before = (
                ratio[wave, degree - 1] * p[wave, degree - 2]
                if degree > wave + 1
                else 0.0
            )
            p[wave, degree] = (SINES * p[wave, degree - 1] - before) / ratio[
                wave, degree
            ]
    slope = -(n[:, :-1] * ratio[:, 1:])[..., None] * p[:, 1:]
    slope[:, 1:] += ((n + 1) * ratio)[:, 1:-1, None] * p[:, :-2]
    return p[:, :-1], slope / (1 - SINES**2)


def simulate(members: int, days: int, seed: int = 0) -> np.ndarray:
    """Return vorticity (members, moments, LATITUDES, LONGITUDES).

    Each member has a random beginning of its own.
    """
    p, slope = harmonics()
    m, _, n = np.mgrid[: WAVES + 1, :1, : WAVES + 1]
    drawn = np.random.default_rng(seed).standard_normal(
        (2, WAVES + 1, members, WAVES + 1)
    )
    zeta = (
        (drawn[0] + 1j * drawn[1] * (m > 0))
        * (n >= m)
        * (n > 0)
        * np.exp(-((n - 4.5) ** 2) / 4)
        / 5
    )

    def on_grid(coefficients, functions):
        return np.fft.irfft(
            coefficients @ functions, LONGITUDES, axis=0, norm="forward"
        )

    def tendency(zeta):
        psi = zeta / -np.maximum(n * (n + 1), 1)
        # The second is that of f, on a sphere that turns once a day
        of_sine = on_grid(zeta, slope) + 4 * np.pi
        jacobian = on_grid(1j * m * psi, p) * of_sine - on_grid(psi, slope) * on_grid(
            1j * m * zeta, p
        )
        waves = np.fft.rfft(jacobian, axis=0, norm="forward")[: WAVES + 1]
        return -(waves * AREAS) @ p.swapaxes(1, 2) - 2.0 * (n / WAVES) ** 8 * zeta

    moments, before = [], [tendency(zeta)] * 2
    for hour in range(24 * days + 1):
        if hour % HOURS == 0:
            moments.append(on_grid(zeta, p).transpose(1, 2, 0))
        before = [tendency(zeta), *before[:2]]
        # Adams and Bashforth
        zeta = zeta + (23 * before[0] - 16 * before[1] + 5 * before[2]) / (12 * 24)
    return np.stack(moments, 1)


def write(path: str, members: int, days: int) -> None:
    """Write such data as HDF5."""
    with h5py.File(path, "w") as file:
        file["vorticity"] = simulate(members, days).astype(np.float32)


# -- The model -------------------------------------------------------------------------


class Weather(mpipipe.train.Task):
    """The change of vorticity in 6 to 24 hours, from vorticity and the lead time."""

    unit = "fields"
    data = "weather.h5"
    # Of the file; the last eighth of the members is for validation
    members, days = 64, 16
    longest = 24  # hours of lead time; each row draws its own
    patch, grid = (2, 4), (8, 8)  # points of a patch, and patches
    width, heads, blocks = 48, 4, 2
    picture = ""  # file for a figure of the prediction beside the truth

    def layers(self, shard):
        # Ranks of `seq` have bands of latitude
        bands = (len(shard.positions(self.grid[0])), self.grid[1])
        attend = shard.attend(math.prod(self.grid))
        # Of a patch
        place = np.stack(np.mgrid[: self.grid[0], : self.grid[1]], -1).reshape(-1, 2)
        turns = 4 * np.pi * place / self.grid * (1, 2)  # latitude and longitude

        def lift():
            return nn.Sequential(
                [
                    nn.Patches(self.patch, bands),
                    nn.Linear(4 * math.prod(self.patch), self.width),
                ]
            )

        def norm():
            return nn.AdaptiveNorm(self.width, 2, "lead_time")

        def mix():
            # With base 8 the pairs of a head turn 4, 2 and 1 times around the sphere.
            attention = nn.SelfAttention(
                self.width, self.heads, attend=attend, coordinates=turns, rope_base=8.0
            )
            return nn.PreNormResidual(norm(), attention)

        def think():
            return nn.PreNormResidual(
                norm(), nn.FeedForward(self.width, 4 * self.width)
            )

        def project():
            last = nn.Linear(self.width, math.prod(self.patch))
            return nn.Sequential(
                [
                    nn.LayerNorm(self.width),
                    last,
                    nn.Patches(self.patch, bands, back=True),
                ]
            )

        blocks = [layer() for _ in range(self.blocks) for layer in (mix, think)]
        return [lift, *blocks, project]

    def loss(self, output, target):
        error, area = output - target["change"], target["area"]
        # Of this rank's bands: those at a pole have little
        weight = LONGITUDES * float(area.sum())
        return (
            float((area * error**2).sum()) / weight,
            2 / weight * area * error,
            weight,
        )

    def batch(self, step, rows, shard):
        return self.read(np.random.default_rng([1, step]), False, rows, shard)

    def validation(self, index, rows, shard):
        return self.read(np.random.default_rng([2, index]), True, rows, shard)

    def read(self, generator, kept, rows, shard):
        """Return inputs and targets; read only this rank's bands at these moments."""
        bands, first, most = (
            shard.positions(self.grid[0]),
            self.members - self.members // 8,
            self.longest // HOURS,
        )
        own = slice(bands[0] * self.patch[0], (bands[-1] + 1) * self.patch[0])
        low, high = (first, self.members) if kept else (0, first)
        places = generator.integers(
            (low, 0, 1),
            (high, 24 // HOURS * self.days + 1 - most, most + 1),
            (rows.stop, 3),
        )
        now, later = np.empty(
            (2, len(rows), own.stop - own.start, LONGITUDES), np.float32
        )
        row = rows.start
        try:
            with h5py.File(self.data) as file:
                for row in rows:
                    member, moment, ahead = places[row]
                    now[row - rows.start] = file["vorticity"][member, moment, own]
                    later[row - rows.start] = file["vorticity"][
                        member, moment + ahead, own
                    ]
        except (OSError, IndexError, ValueError) as error:
            raise DataError(
                f"row {row} is not in {self.data}: {error}",
                remedy="`python weather.py FILE` makes it",
            ) from error
        east = 2 * np.pi / LONGITUDES * np.arange(LONGITUDES)
        where = np.stack(
            np.broadcast_arrays(SINES[own, None], np.sin(east), np.cos(east)), -1
        )
        inputs = np.concatenate(
            [now[..., None], np.broadcast_to(where, (*now.shape, 3))], -1
        )
        area = np.broadcast_to(
            AREAS[own, None, None], (len(now), own.stop - own.start, 1, 1)
        )
        days = places[rows, 2:] * HOURS / 24
        inputs = mpipipe.Branches(inputs, lead_time=np.concatenate([days, days**2], 1))
        return inputs, {"change": (later - now)[..., None], "area": area}

    def metrics(self, output, target):
        change = float((target["area"] * target["change"] ** 2).sum())
        # The loss of "nothing changes"
        return {"persistence": change / (LONGITUDES * float(target["area"].sum()))}

    def show(self, output, target, shard):
        fields = [
            shard.whole(field[:3, ..., 0]) for field in (target["change"], output)
        ]
        if self.picture and shard.rank == 0:
            draw(self.picture, *fields)
        return ""


def draw(path: str, truth: np.ndarray, prediction: np.ndarray) -> None:
    """Draw predictions of changes beside the truth, and the differences."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5), layout="constrained")
    east, north = np.linspace(0, 360, LONGITUDES), np.degrees(np.arcsin(SINES))
    rows = [
        ("truth", truth),
        ("prediction", prediction),
        ("difference", prediction - truth),
    ]
    for place, axes in enumerate(figure.subplots(3, len(truth)).flat):
        name, fields = rows[place // len(truth)]
        levels = np.linspace(-1.05, 1.05, 16) * abs(truth).max()
        axes.contourf(
            east,
            north,
            fields[place % len(truth)],
            levels,
            cmap="RdBu_r",
            extend="both",
        )
        axes.set(xticks=[], yticks=[], ylabel=name if place % len(truth) == 0 else "")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    write(sys.argv[1], Weather.members, Weather.days)
