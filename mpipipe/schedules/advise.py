"""How many micro-batches to cut a batch into."""

from __future__ import annotations

from dataclasses import dataclass

from mpipipe.schedules.schedule import at_least_one

PER_RANK = 4  # GPipe (arXiv:1811.06965, section 2.3): with M >= 4P the bubble hardly counts


@dataclass(frozen=True)
class Advice:
    """So many micro-batches, and the bubble to expect: the idle part of the ranks' time, idle / (ranks * makespan)."""

    microbatches: int
    bubble_fraction: float


def advise(ranks: int, chunks: int = 1) -> Advice:
    """Four micro-batches per rank, and the bubble fraction (P-1) / (VM + P-1) of 1F1B over them.

    Parameters
    ----------
    ranks : P, at least 1
    chunks : V, stages per rank: interleaving makes the bubble smaller

    Raises
    ------
    ArgumentError : a count below 1
    """
    ranks, chunks = at_least_one("ranks", ranks), at_least_one("chunks", chunks)
    microbatches = PER_RANK * ranks
    return Advice(microbatches, (ranks - 1) / (chunks * microbatches + ranks - 1))
