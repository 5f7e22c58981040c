"""What the ranks of a pipeline, and of its replicas, agree on at the start of each call."""

from __future__ import annotations

from functools import lru_cache

from mpipipe.errors import MismatchError, MpipipeError
from mpipipe.job import Ballot, RankGroup, digest
from mpipipe.pipeline.batch import BatchFacts
from mpipipe.text import counted

CALLS = ("step", "forward_train", "backward", "evaluate", "forward", "durations", "close")
DIFFERENT = (
    "ranks call different methods of a pipeline, or with different scales or values of accumulate"
)
REMEDY = (
    f"call {', '.join(CALLS[:-1])} and {CALLS[-1]} on all ranks, in the same order and with "
    "the same arguments"
)


class Agreement:
    """The agreements of one pipeline."""

    def __init__(self, pipe: RankGroup, replicas: RankGroup | None, name: str) -> None:
        self.pipe = pipe
        self.replicas = replicas
        self.where = f" of {name}"
        self.count = 0  # calls so far
        self.codes: dict[tuple[str, tuple], int] = {}

    def reach(
        self,
        call: str,
        batch: BatchFacts,
        error: Exception | None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> tuple[BatchFacts, MpipipeError | None]:
        """Agree on a call; return what all ranks know, and the error that all are to raise.

        All ranks get the same error, and can go on together after it; they cannot after one that is
        raised here.
        """
        self.count += 1
        if isinstance(error, MpipipeError) and error.rank is None:
            error.rank = self.pipe.rank
        ballot = self._ballot(call, scale, accumulate, error)
        table = ballot.cast(self.pipe, batch)
        whole = BatchFacts(*table.max(0).tolist())
        rows = whole.rows
        target_rows = whole.target_rows
        if not ballot.failed and rows and target_rows not in (0, rows):
            message = "inputs and targets have different numbers of rows"
            target_count = counted(target_rows, "row")
            ballot.refuse(
                MismatchError(
                    message,
                    found=f"{target_count} of targets",
                    expected=f"{rows}, as the inputs have",
                )
            )
        # What replicas add up or compare.
        of_replica = whole.counted, whole.entries, whole.mean_over, whole.uneven
        targets: tuple[tuple[int, ...], ...] = (of_replica,)
        if self.replicas is not None:
            targets = tuple(map(tuple, ballot.cast(self.replicas, of_replica).tolist()))
            if not ballot.failed and len({mean_over for _, _, mean_over, _ in targets}) > 1:
                ballot.refuse(
                    MismatchError(
                        "the losses of replicas are means over different things",
                        found="mean_over_entries differs",
                        expected="the same on all replicas",
                        remedy="give the same loss to all replicas",
                    )
                )
        agreed = _agreed(whole, targets)
        try:
            ballot.decide()
        except MpipipeError as problem:
            if not problem.agreed:
                raise
            return agreed, problem
        return agreed, None

    def _ballot(
        self, call: str, scale: float, accumulate: bool, error: Exception | None = None
    ) -> Ballot:
        facts = (("scale", float(scale)), ("accumulate", accumulate))
        if (call, facts) not in self.codes:
            # The next call nearly always has the same.
            self.codes = {(call, facts): digest(call, facts)}
        code = self.codes[call, facts]
        return Ballot(
            call, facts, error, DIFFERENT, REMEDY, number=self.count, where=self.where, code=code
        )


@lru_cache(maxsize=64)  # the next step nearly always has the same
def _agreed(facts: BatchFacts, replicas: tuple[tuple[int, ...], ...]) -> BatchFacts:
    """What is agreed on, from what one pipeline and then all replicas know."""
    first_rows, first_entries, mean_over, _ = replicas[0]
    counted = 0
    entries = 0
    is_uneven = False
    for rows, size, _, uneven in replicas:
        counted += rows
        entries += size
        if uneven or size * first_rows != first_entries * rows:
            is_uneven = True
    return facts._replace(counted=counted, entries=entries, mean_over=mean_over, uneven=is_uneven)
