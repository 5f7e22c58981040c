"""All ranks agree on a call before they take part in it: one small all-gather over the pipe, one over the replicas."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from mpipipe.comm.alarm import wait
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError
from mpipipe.pipeline.microbatches import flatten

CALLS = ("step", "evaluate", "forward", "durations", "close")


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
    content = repr((isinstance(batch, list), facts)).encode()
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big") % (1 << 62) + 1


class Agreement:
    """The collective at the start of each call.

    Parameters
    ----------
    pipe : private communicator over the pipe
    replicas : private communicator over the ranks with the same stages, or None
    """

    def __init__(self, pipe, replicas):
        self.pipe, self.replicas = pipe, replicas
        self.count = 0
        self.table = np.zeros((pipe.size, 4 + len(Batch._fields)), np.int64)
        self.replica_table = np.zeros((replicas.size if replicas else 1, 5), np.int64)

    def reach(
        self, call: str, batch: Batch, error: Exception | None, scale: float = 1.0
    ) -> tuple[Agreed, MpipipeError | None]:
        """What was agreed, and the error that every rank is to raise, or None.

        An error that some rank brings, calls of different methods, and inputs and targets of different rows are such
        errors; the ranks are in step after them.
        """
        self.count += 1
        what = CALLS.index(call), self.count, int(np.float64(scale).view(np.int64))
        wait(self.pipe.Iallgather(np.array([error is not None, *what, *batch], np.int64), self.table))
        table = self.table.tolist()
        signature, rows, target_rows, microbatches, listed = (max(column) for column in list(zip(*table))[4:])
        failed = any(row[0] for row in table) or any(row[1:4] != table[0][1:4] for row in table)
        failed = failed or (target_rows > 0 and target_rows != rows)
        total = rows
        if self.replicas is not None:
            wait(self.replicas.Iallgather(np.array([failed, *what, rows], np.int64), self.replica_table))
            others = self.replica_table.tolist()
            failed = any(row[0] for row in others) or any(row[1:4] != others[0][1:4] for row in others)
            total = sum(row[4] for row in others)
        problem = self._explain(call, error, rows, target_rows, scale) if failed else None
        return Agreed(signature, microbatches, bool(listed), total), problem

    def _explain(self, call, error, rows, target_rows, scale) -> MpipipeError:
        """The slow path: exchange what went wrong in words; the same error on every rank."""
        if error is not None and not isinstance(error, MpipipeError):
            error = ArgumentError(f"{type(error).__name__}: {error}")
        if error is not None and error.rank is None:
            error.rank = self.pipe.rank
        call = f"{call} (call {self.count}{'' if scale == 1 else f', scale {scale}'})"
        mine = error, call, target_rows if target_rows not in (0, rows) else 0, rows
        entries = self.pipe.allgather(mine)
        me = self.pipe.rank
        if self.replicas is not None:
            entries = [entry for block in self.replicas.allgather(entries) for entry in block]
            me += self.replicas.rank * self.pipe.size
        origin, problem = _first_problem(entries)
        problem.echo = me != origin
        return problem


def _first_problem(entries):
    """(index of the rank that reports, error) from (error, call, rows of targets that differ, rows) of every rank."""
    for index, (problem, *_) in enumerate(entries):
        if problem is not None:
            return index, problem
    calls = [call for _, call, _, _ in entries]
    for index, call in enumerate(calls):
        if call != calls[0]:
            return 0, MismatchError(
                "ranks call different methods of the pipeline, or with different scales",
                found=f"rank {index}: {call}",
                expected=f"rank 0: {calls[0]}",
                remedy="call step, evaluate, forward, durations and close on all ranks, in the same order and "
                "with the same scale",
            )
    index, (_, _, target_rows, rows) = next((i, entry) for i, entry in enumerate(entries) if entry[2])
    return index, MismatchError(
        "inputs and targets have different numbers of rows",
        found=f"{target_rows} rows of targets",
        expected=f"{rows}, as the inputs have",
    )
