"""What the ranks of a pipeline, and of its replicas, agree on at the start of each call."""

from __future__ import annotations

from functools import lru_cache

from mpipipe.errors import MismatchError, MpipipeError
from mpipipe.job import Ballot, digest
from mpipipe.pipeline.batch import BatchFacts
from mpipipe.pipeline.construction import AgreedRanks
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

    def __init__(self, ranks: AgreedRanks, name: str) -> None:
        self.pipe = ranks.pipe
        self.replicas = ranks.replicas
        self.name = name
        self.count = 0  # calls so far
        for group in ranks.groups:
            group.progress = lambda: f"call {self.count} of {name}"
            group.related = ranks.groups

    def reach(
        self,
        call: str,
        batch: BatchFacts,
        error: Exception | None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> BatchFacts:
        """Agree on a call; return what all ranks know, or raise the `error` of any on all ranks."""
        self.count += 1
        if isinstance(error, MpipipeError) and error.rank is None:
            error.rank = self.pipe.rank
        facts = (("scale", float(scale)), ("accumulate", accumulate))
        ballot = Ballot(
            call,
            facts,
            error,
            DIFFERENT,
            REMEDY,
            number=self.count,
            where=f" of {self.name}",
            code=_code(call, facts),
        )
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
        if self.replicas is not None:
            # What replicas add up or compare.
            own = whole.counted, whole.entries, whole.mean_over, whole.uneven
            of_replicas = ballot.cast(self.replicas, own)
            counted_rows, entries, mean_over, uneven = of_replicas.T
            if not ballot.failed and len(set(mean_over.tolist())) > 1:
                ballot.refuse(
                    MismatchError(
                        "the losses of replicas are means over different things",
                        found="mean_over_entries differs",
                        expected="the same on all replicas",
                        remedy="give the same loss to all replicas",
                    )
                )
            unlike = entries * counted_rows[0] != entries[0] * counted_rows
            whole = whole._replace(
                counted=int(counted_rows.sum()),
                entries=int(entries.sum()),
                mean_over=int(mean_over[0]),
                uneven=int(uneven.any() or unlike.any()),
            )
        ballot.decide()
        return whole


_code = lru_cache(maxsize=16)(digest)  # the next call nearly always has the same facts
