"""How many micro-batches to cut a batch into."""

from __future__ import annotations

from dataclasses import dataclass

from mpipipe.schedules.schedule import at_least_one

PER_RANK = 4  # GPipe (arXiv:1811.06965, section 2.3): with M >= 4P the bubble hardly counts


@dataclass(frozen=True)
class Advice:
    """A number of micro-batches, and the bubble to expect with it.

    Attributes
    ----------
    microbatches : int
        M, the number of micro-batches to cut a batch into.
    bubble_fraction : float
        Idle part of the ranks' time: idle / (ranks * makespan).
    """

    microbatches: int
    bubble_fraction: float


def advise(ranks: int, chunks: int = 1) -> Advice:
    """Advise four micro-batches per rank, and give the bubble fraction (P-1) / (VM + P-1) of 1F1B over them.

    Parameters
    ----------
    ranks : int
        P, at least 1.
    chunks : int, optional
        V, stages per rank. Interleaving makes the bubble smaller.

    Returns
    -------
    Advice
        The number of micro-batches and the bubble fraction.

    Raises
    ------
    ArgumentError
        A count is below 1.

    Examples
    --------
    >>> from mpipipe.schedules import advise
    >>> advice = advise(ranks=4, chunks=2)
    >>> advice.microbatches, round(advice.bubble_fraction, 3)
    (16, 0.086)
    """
    ranks, chunks = at_least_one("ranks", ranks), at_least_one("chunks", chunks)
    microbatches = PER_RANK * ranks
    return Advice(microbatches, (ranks - 1) / (chunks * microbatches + ranks - 1))
