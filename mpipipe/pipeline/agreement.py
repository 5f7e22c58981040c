"""What the ranks of a pipeline, and of its replicas, agree on at the start of each call.

Most calls wait for the agreement before they begin. A launched step does not wait. It presumes what was agreed on for
the training step before it, and begins a vote that tests it:

    rank 0   agreed: step 7 | 7 | vote: launch 8 ...... 8 ....... settle | vote: launch 9 .........
    rank 3   agreed: step 7 ....... 7 ........ | vote: launch 8 .... 8 ... settle | vote: launch 9

Two things must hold for that to be right.

1. Each rank has a batch as it had before: inputs and targets of the same shapes. A rank sees that by itself. If it is
   not so, or an argument is wrong, the rank raises at once, and the others hear of it as of any failure in a step.
2. Every rank launches, with the same scale. The vote finds that out. It is settled before the step ends on any rank, so
   gradients are handed out only by ranks that agree. No rank waits longer for the vote than for the step itself: a
   backward needs the forwards of all ranks, and each rank votes before its forwards.
"""

from __future__ import annotations

from functools import lru_cache

from mpipipe.errors import ArgumentError, MismatchError, MpipipeError
from mpipipe.job import Ballot, RankGroup, Vote, digest
from mpipipe.pipeline.batch import TRAINS, BatchFacts
from mpipipe.text import counted

CALLS = ("step", "launch", "forward_train", "backward", "evaluate", "forward", "durations", "close")
DIFFERENT = "ranks call different methods of a pipeline, or with different scales or values of accumulate"
REMEDY = f"call {', '.join(CALLS[:-1])} and {CALLS[-1]} on all ranks, in the same order and with the same arguments"


class Agreement:
    """The agreements of one pipeline: waited for by most calls, voted on by launched steps, unless on GPUs."""

    def __init__(self, pipe: RankGroup, replicas: RankGroup | None, name: str, runs_ahead: bool) -> None:
        self.pipe, self.replicas, self.where, self.runs_ahead = pipe, replicas, f" of {name}", runs_ahead
        self.count = 0  # calls so far
        self.codes: dict[tuple[str, tuple], int] = {}
        self.trained: tuple[BatchFacts, BatchFacts] | None = None  # of the last step: this rank's, and the agreed ones

    def reach(
        self, call: str, batch: BatchFacts, error: Exception | None, scale: float = 1.0, accumulate: bool = False
    ) -> tuple[BatchFacts, MpipipeError | None]:
        """Return what was agreed on, and the error that every rank is to raise, or None; collective.

        All ranks get the same error, and can go on together after it; they cannot after one that is raised here.
        A launched step does not wait where all may run ahead: see `_presume`.
        """
        if call == "launch" and self.runs_ahead and self.trained is not None:
            return self._presume(batch, error, (scale, accumulate), *self.trained), None
        self.count += 1
        if isinstance(error, MpipipeError) and error.rank is None:
            error.rank = self.pipe.rank
        ballot = self._ballot(call, scale, accumulate, error)
        table = ballot.cast(self.pipe, batch)
        whole = BatchFacts(*table.max(0).tolist())
        rows, target_rows = whole.rows, whole.target_rows
        if not ballot.failed and target_rows not in (0, rows):
            message, found = "inputs and targets have different numbers of rows", counted(target_rows, "row")
            ballot.refuse(MismatchError(message, found=f"{found} of targets", expected=f"{rows}, as the inputs have"))
        targets: tuple[tuple[int, ...], ...] = (_of_replica(whole),)
        if self.replicas is not None:
            targets = tuple(map(tuple, ballot.cast(self.replicas, targets[0]).tolist()))
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
        if call in TRAINS:
            self.trained = batch, agreed
        elif call == "forward_train":  # a launch before its backward is an error that all ranks are to raise
            self.trained = None
        return agreed, None

    def _presume(
        self,
        batch: BatchFacts,
        error: Exception | None,
        how: tuple[float, bool],
        before: BatchFacts,
        agreed: BatchFacts,
    ) -> BatchFacts:
        """Begin the vote on a launched step; return what was agreed on before. Raises on this rank alone."""
        if error is not None:
            wrong = error if isinstance(error, MpipipeError) else ArgumentError(f"{type(error).__name__}: {error}")
            wrong.rank = self.pipe.rank if wrong.rank is None else wrong.rank
            raise wrong
        self.count += 1
        if batch != before:
            raise ArgumentError(
                "launch was called with another batch than the step before it had",
                rank=self.pipe.rank,
                found=_described(batch),
                expected=f"{_described(before)}, in arrays of the same shapes and dtypes",
                remedy="make this step with `step`, which agrees on the shapes before it begins; then launch again",
            )
        Vote(self.pipe, self._ballot("launch", *how), batch)
        if self.replicas is not None:
            Vote(self.replicas, self._ballot("launch", *how), _of_replica(batch))
        return agreed

    def settle(self) -> None:
        """Wait for the votes of a launched step; raises what they have found, on all ranks that disagree."""
        self.pipe.settle()
        if self.replicas is not None:
            self.replicas.settle()

    def _ballot(self, call: str, scale: float, accumulate: bool, error: Exception | None = None) -> Ballot:
        facts = (("scale", float(scale)), ("accumulate", accumulate))
        if (call, facts) not in self.codes:
            self.codes = {(call, facts): digest(call, facts)}  # the next call nearly always has the same
        code = self.codes[call, facts]
        return Ballot(call, facts, error, DIFFERENT, REMEDY, number=self.count, where=self.where, code=code)


def _of_replica(facts: BatchFacts) -> tuple[int, ...]:
    """The facts that replicas add up or compare."""
    return facts.rows, facts.entries, facts.mean_over, facts.uneven


@lru_cache(maxsize=64)  # the next step nearly always has the same
def _agreed(facts: BatchFacts, replicas: tuple[tuple[int, ...], ...]) -> BatchFacts:
    """What is agreed on, from what one pipeline and then all replicas know."""
    first_rows, first_entries, mean_over, _ = replicas[0]
    uneven = any(uneven or size * first_rows != first_entries * rows for rows, size, _, uneven in replicas)
    rows, entries, *_ = map(sum, zip(*replicas))
    return facts._replace(rows=rows, entries=entries, mean_over=mean_over, uneven=uneven)


def _described(batch: BatchFacts) -> str:
    both = (batch.rows, "inputs"), (batch.target_rows, "targets")
    rows = [f"{counted(count, 'row')} of {what}" for count, what in both if count]
    pieces = f" in a list of {batch.microbatches}" if batch.listed else ""
    return (" and ".join(rows) or "nothing") + pieces
