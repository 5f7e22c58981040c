"""What the ranks of a pipeline, and of its replicas, agree on at the start of each call."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from mpipipe.comm.consensus import Ballot, digest
from mpipipe.comm.group import Group
from mpipipe.errors import MismatchError, MpipipeError
from mpipipe.pipeline.microbatches import flatten

CALLS = ("step", "evaluate", "forward", "durations", "close")
DIFFERENT = "ranks call different methods of a pipeline, or with different scales"
REMEDY = f"call {', '.join(CALLS[:-1])} and {CALLS[-1]} on all ranks, in the same order and with the same scale"


class Batch(NamedTuple):
    """What this rank knows of the batch; zeros where it holds neither inputs nor targets."""

    signature: int = 0  # the same for inputs of the same shapes
    rows: int = 0
    target_rows: int = 0
    microbatches: int = 0
    listed: int = 0  # whether the inputs came as a list of micro-batches


class Agreed(NamedTuple):
    """What the ranks found out about the batch."""

    signature: int
    microbatches: int
    listed: bool
    total_rows: int  # over all replicas


def signature_of(batch) -> int:
    """A number from 1 to 2^62 for the shapes and dtypes of a batch, the same in every process."""
    trees = batch if isinstance(batch, list) else [batch]
    facts = []
    for tree in trees:
        leaves, structure = flatten(tree)
        facts.append((structure, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)))
    content = repr((isinstance(batch, list), facts)).encode("utf-8", "backslashreplace")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big") % (1 << 62) + 1


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

    def __init__(self, pipe: Group, replicas: Group | None, name: str):
        self.pipe, self.replicas, self.where = pipe, replicas, f" of {name}"
        self.count = 0
        self.codes: dict = {}

    def reach(
        self, call: str, batch: Batch, error: Exception | None, scale: float = 1.0
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
        ballot = Ballot(call, facts, error, DIFFERENT, REMEDY, self.count, self.where, code)
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
