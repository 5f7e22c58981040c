"""What the ranks of a pipeline, and of its replicas, agree on at the start of each call."""

from __future__ import annotations

from typing import NamedTuple

from mpipipe.comm.consensus import Ballot, digest
from mpipipe.comm.group import Group
from mpipipe.errors import MismatchError, MpipipeError
from mpipipe.pipeline.batch import BatchFacts

CALLS = ("step", "evaluate", "forward", "durations", "close")
DIFFERENT = "ranks call different methods of a pipeline, or with different scales"
REMEDY = f"call {', '.join(CALLS[:-1])} and {CALLS[-1]} on all ranks, in the same order and with the same scale"


class Agreed(NamedTuple):
    """What the ranks found out about the batch."""

    signature: int
    microbatches: int
    listed: bool
    total_rows: int  # over all replicas


class Agreement:
    """The collective at the start of each call.

    Parameters
    ----------
    pipe : group of the ranks of the pipeline
    replicas : group of the ranks with the same stages, or None
    name : of the pipeline, for errors

    Attributes
    ----------
    count : calls so far
    """

    def __init__(self, pipe: Group, replicas: Group | None, name: str) -> None:
        self.pipe, self.replicas, self.where = pipe, replicas, f" of {name}"
        self.count = 0
        self.codes: dict[tuple[str, tuple], int] = {}

    def reach(
        self, call: str, batch: BatchFacts, error: Exception | None, scale: float = 1.0
    ) -> tuple[Agreed, MpipipeError | None]:
        """What was agreed, and the error that every rank is to raise, or None.

        An error that some rank brings, calls of different methods, and inputs and targets of different rows are such
        errors; the ranks are in step after them. Anything else that is raised here means that they are not.
        """
        self.count += 1
        if isinstance(error, MpipipeError) and error.rank is None:
            error.rank = self.pipe.rank
        facts = (("scale", float(scale)),)
        if (call, facts) not in self.codes:
            self.codes = {(call, facts): digest(call, facts)}  # of the last call: nearly always that of the next one
        code = self.codes[call, facts]
        ballot = Ballot(call, facts, error, DIFFERENT, REMEDY, number=self.count, where=self.where, code=code)
        table = ballot.cast(self.pipe, batch)
        signature, rows, target_rows, microbatches, listed = table.max(0).tolist()
        if not ballot.failed and target_rows not in (0, rows):
            ballot.refuse(
                MismatchError(
                    "inputs and targets have different numbers of rows",
                    found=f"{target_rows} rows of targets",
                    expected=f"{rows}, as the inputs have",
                )
            )
        total = rows
        if self.replicas is not None:
            total = int(ballot.cast(self.replicas, [rows]).sum())
        agreed = Agreed(signature, microbatches, bool(listed), total)
        try:
            ballot.decide()
        except MpipipeError as problem:
            if not problem.agreed:
                raise
            return agreed, problem
        return agreed, None
