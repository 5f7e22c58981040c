"""What a plan decides, and the schedule that follows from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mpipipe import schedules
from mpipipe.schedules import Schedule
from mpipipe.schedules.recompute import before_backwards


@dataclass(frozen=True)
class Choice:
    """What a plan decides.

    Parameters
    ----------
    schedule : str
        A name that `schedules.by_name` knows.
    chunks : int
        Stages on each rank.
    microbatches : int
        Of a step in each replica.
    partition : tuple of int
        Number of layers of each stage.
    recompute : bool
        Whether every forward is run again before its backward.
    recompute_limit : int, optional
        Activations of stages that a rank may hold; as many forwards as that needs are run again.

    Examples
    --------
    >>> from mpipipe.planning import Choice
    >>> choice = Choice("one_f_one_b", 1, 4, (3, 2))
    >>> choice.ranges
    [(0, 3), (3, 5)]
    >>> choice.build(ranks=2).stages
    2
    """

    schedule: str
    chunks: int
    microbatches: int
    partition: tuple[int, ...]
    recompute: bool = False
    recompute_limit: int | None = None

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) of the layers of each stage."""
        return list(pairwise(accumulate(self.partition, initial=0)))

    def placement(self, ranks: int) -> tuple[int, ...]:
        """Look up the rank of each stage.

        Parameters
        ----------
        ranks : int
            Of the pipeline.

        Returns
        -------
        tuple of int
            As the schedule has it for any number of micro-batches.
        """
        return schedules.by_name(self.schedule, ranks=ranks, chunks=self.chunks, microbatches=1).placement

    def build(self, ranks: int, trained: Collection[int] | None = None) -> Schedule:
        """Build the schedule that a training with this plan runs.

        Parameters
        ----------
        ranks : int
            Of the pipeline.
        trained : collection of int, optional
            Layers with something to train; by default all.

        Returns
        -------
        Schedule
            With its recomputations.

        Raises
        ------
        ArgumentError
            The numbers do not fit, or no recomputation keeps the limit.
        """
        made = schedules.by_name(self.schedule, ranks=ranks, chunks=self.chunks, microbatches=self.microbatches)
        if trained is not None:
            frozen = {stage for stage, cut in enumerate(self.ranges) if not any(n in trained for n in range(*cut))}
            made = schedules.with_frozen(made, frozen)
        if self.recompute_limit is not None:
            made = schedules.with_recompute(made, memory_limit=self.recompute_limit)
        return before_backwards(made) if self.recompute else made

    @property
    def recomputation(self) -> str:
        """Which forwards are run again, in a word."""
        if self.recompute:
            return "all"
        return "-" if self.recompute_limit is None else f"to hold {self.recompute_limit}"
