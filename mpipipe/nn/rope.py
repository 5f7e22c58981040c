"""Rotary positions: scalings of frequencies for longer sequences, and tables.

Each scaling takes the plain frequencies base^(-2i/head_dim) of the pairs i, and gives those that
are used in their place. Frequencies of few turns within the first length are divided by a factor;
but for LinearScaling, those of many turns stay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError


class RopeScaling(ABC):
    """A scaling of rotary frequencies: a frozen dataclass whose `kind` names it in files."""

    kind: str
    # Names of two fields, of which the first is the smaller one.
    ordered: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        numbers = vars(self)
        of = f"of {type(self).__name__}"
        for name, value in numbers.items():
            if name == "kind" or (name == "attention_factor" and value is None):
                continue
            fits = type(value) in (int, float) and 0 < value < math.inf
            if name == "factor":
                fits = fits and value >= 1
            elif name == "original_positions":
                fits = type(value) is int and fits
            if not fits:
                raise ArgumentError(
                    f"{name} {of}",
                    found=repr(value),
                    expected="a finite number above 0: a factor of at least 1, an integer of "
                    "positions",
                )
        if self.ordered:
            low, high = self.ordered
            if not numbers[low] < numbers[high]:
                raise ArgumentError(
                    f"{low} and {high} {of}",
                    found=f"{numbers[low]} and {numbers[high]}",
                    expected=f"{low} below {high}",
                )

    @property
    def amplitude(self) -> float:
        """Factor on cosine and sine: 1 but for YarnScaling."""
        return 1.0

    @abstractmethod
    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Return the frequencies in use.

        Parameters
        ----------
        frequencies, base : numpy.ndarray, float
            Plain frequencies (head_dim / 2,), and their base.

        Returns
        -------
        numpy.ndarray
            (head_dim / 2,).
        """


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """All frequencies divided by a factor.

    Chen et al., "Extending context window via position interpolation" (2023).

    Parameters
    ----------
    factor : float
        At least 1.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe.nn import LinearScaling
    >>> LinearScaling(4.0).scaled(np.array([1.0, 0.5]), 10000.0)
    array([0.25 , 0.125])
    """

    factor: float
    kind: str = field(default="linear", init=False)

    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Frequencies by the turns they make within the first length, as in Llama 3.1 and later.

    With n = `original_positions` * frequency / 2 pi turns: above `high_freq_factor` a frequency
    stays, below `low_freq_factor` it is divided by `factor`, and between them it is (1 - s) f /
    factor + s f with s = (n - low) / (high - low). Source: `apply_scaling` in
    `models/llama3/model.py` of Meta's llama-models (2024).

    Parameters
    ----------
    factor : float
        At least 1.
    low_freq_factor, high_freq_factor : float
        Turns, above 0, the second larger than the first.
    original_positions : int
        The first length, in positions.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe.nn import Llama3Scaling
    >>> turns = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    >>> scaling = Llama3Scaling(8.0, **turns, original_positions=8192)
    >>> scaling.scaled(np.array([1.0, 1e-5]), 500000.0)
    array([1.00e+00, 1.25e-06])
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    kind: str = field(default="llama3", init=False)
    ordered = ("low_freq_factor", "high_freq_factor")

    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        count = self.original_positions * frequencies / (2 * math.pi)
        stays = np.clip(
            (count - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1
        )
        return (1 - stays) * frequencies / self.factor + stays * frequencies


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """Frequencies scaled by the place of their pair: Peng et al., "YaRN" (2023).

    Pair i makes r turns within the first length where i(r) = head_dim ln(original_positions / (2 pi
    r)) / (2 ln base). Up to i(beta_fast), rounded down, a frequency stays; from i(beta_slow),
    rounded up, it is divided by `factor`; between them the part that is divided grows evenly with i
    (section 3.2 there; rounded as in the authors' code).

    Parameters
    ----------
    factor : float
        At least 1.
    original_positions : int
        The first length, in positions.
    beta_fast, beta_slow : float
        Turns, above 0, the first larger than the second.
    attention_factor : float, optional
        Factor on cosine and sine, of queries and of keys, above 0; by default 0.1 ln(factor) + 1
        (section 3.4 there).

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe.nn import YarnScaling
    >>> scaling = YarnScaling(4.0, original_positions=32768)
    >>> round(scaling.amplitude, 4)
    1.1386
    >>> plain = 1e6 ** (-np.arange(0, 128, 2) / 128)
    >>> scaling.scaled(plain, 1e6)[[0, -1]] / plain[[0, -1]]
    array([1.  , 0.25])
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    kind: str = field(default="yarn", init=False)
    ordered = ("beta_slow", "beta_fast")

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1

    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        head_dim = 2 * len(frequencies)

        def pair_of(turns: float) -> float:
            logarithm = math.log(self.original_positions / (turns * 2 * math.pi))
            return head_dim * logarithm / (2 * math.log(base))

        first = max(math.floor(pair_of(self.beta_fast)), 0)
        last = min(math.ceil(pair_of(self.beta_slow)), head_dim - 1)
        width = last - first if last > first else 0.001  # a step at one pair
        divided = np.clip((np.arange(len(frequencies)) - first) / width, 0, 1)
        return frequencies / self.factor * divided + frequencies * (1 - divided)


ROPE_SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}


def scaling_of(numbers: Mapping[str, object]) -> RopeScaling:
    """Return the scaling with these fields, as `dataclasses.asdict` gives them.

    Raises ArgumentError for an unknown kind, and for numbers that do not belong to it.
    """
    fields = dict(numbers)
    kind = fields.pop("kind", None)
    if kind not in ROPE_SCALINGS:
        raise ArgumentError(
            "unknown rope scaling", found=repr(kind), expected=" or ".join(ROPE_SCALINGS)
        )
    try:
        return ROPE_SCALINGS[kind](**fields)
    except TypeError as error:
        raise ArgumentError(
            f"the numbers of a rope scaling do not fit: {error}", found=repr(dict(numbers))
        ) from error


# -- Rotary position embedding (Su et al., "RoFormer", 2021) ---------------------------------------
#
# Neighbouring elements (2i, 2i + 1) of a head are one complex number, turned by the angle position
# * base^(-2i/head_dim). A turn is one complex product, and its adjoint is the product with the
# conjugate.
#
# Other libraries pair element i of a head with element i + head_dim / 2. Rows of their projections
# to queries and keys (and elements of biases, and of gains of norms of heads) come in another order
# within each head: theirs at i is ours at 2i, and theirs at i + head_dim / 2 is ours at 2i + 1.
#
# Positions of n axes turn a head in n blocks, one after the other: each is turned by its own axis,
# as a head of its width would be (Heo et al., "Rotary position embedding for vision transformer",
# 2024, "axial" frequencies).


def angles(
    positions: ArrayLike, head_dim: int, base: float, scaling: RopeScaling | None = None
) -> tuple[np.ndarray, float]:
    """Return angles (seq, head_dim / 2) of positions, and the factor on cosine and sine.

    Positions are (seq,) or (seq, axes).
    """
    numbers = np.asarray(positions, np.float64)
    if numbers.ndim == 1:
        width = head_dim
    else:
        width = head_dim // numbers.shape[1]
    frequencies = base ** (-np.arange(0, width, 2) / width)
    amplitude = 1.0
    if scaling is not None:
        frequencies = scaling.scaled(frequencies, base)
        amplitude = scaling.amplitude
    turned = (numbers[..., None] * frequencies).reshape(len(numbers), head_dim // 2)
    return turned, amplitude


def checked_coordinates(coordinates: ArrayLike, head_dim: int, seq_len: int | None) -> np.ndarray:
    """Return coordinates as float64 (seq, axes); raise ArgumentError if they do not fit."""
    numbers = np.asarray(coordinates)
    pairs = head_dim // 2
    fits = numbers.ndim == 2 and numbers.dtype.kind in "iuf" and numbers.size > 0
    finite = not fits or bool(np.isfinite(numbers).all())
    fits = fits and finite and seq_len in (None, len(numbers)) and pairs % numbers.shape[1] == 0
    if not fits:
        raise ArgumentError(
            "the coordinates of a sequence do not fit it, or its heads",
            found=f"{numbers.dtype}{list(numbers.shape)}"
            + ("" if finite else " with NaN or infinity"),
            expected=f"finite numbers ({seq_len or 'seq'}, axes), a row for each position of the "
            f"whole sequence, and axes that divide the {pairs} pairs of head_dim={head_dim}",
        )
    return numbers.astype(np.float64)


TABLES = 64  # most tables of one stage, by positions


class RopeTables:
    """Tables for `kernels.apply_rope` on arrays of one dtype, made once by `make`.

    Layers of a stage that turn the same positions share one.
    """

    def __init__(self, make: Callable[..., Array], dtype: np.dtype):
        self.make = make
        self.dtype = dtype
        self._table = lru_cache(maxsize=TABLES)(self._made)

    def of(
        self,
        positions: int | ArrayLike,
        head_dim: int,
        base: float,
        scaling: RopeScaling | None = None,
    ) -> Array:
        """Return the table whose i-th row turns the i-th row of the sequence.

        Positions are integers (seq,), or numbers (seq, axes), or how many first ones. The table of
        the first ones is a part of that of the next power of two. A table lives as long as a graph
        which is recorded now.
        """
        if isinstance(positions, int):
            length = 1 << max(positions - 1, 0).bit_length()
            return arrays.keep_for_graph(self._table(length, head_dim, base, scaling))[:positions]
        numbers = np.asarray(positions, np.float64)
        table = self._table(numbers.tobytes(), head_dim, base, scaling, *numbers.shape[1:])
        return arrays.keep_for_graph(table)

    def _made(
        self,
        positions: int | bytes,
        head_dim: int,
        base: float,
        scaling: RopeScaling | None,
        *axes: int,
    ) -> Array:
        """Make the table of the first positions, or of those in float64 bytes."""
        numbers: np.ndarray
        if isinstance(positions, int):
            numbers = np.arange(positions)
        else:
            numbers = np.frombuffer(positions).reshape(-1, *axes)
        return self.make(*angles(numbers, head_dim, base, scaling), self.dtype)
