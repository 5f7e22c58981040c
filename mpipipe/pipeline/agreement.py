"""All ranks agree on a step before they take it: one small all-gather over the pipe, one over the replicas."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from mpipipe.comm.alarm import wait
from mpipipe.comm.share import raise_everywhere
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError
from mpipipe.pipeline.microbatches import flatten

MODES = ("step", "evaluate", "forward")


class Agreed(NamedTuple):
    """What the ranks found out about each other."""

    signature: int  # of the inputs: the same inputs' shapes give the same number
    microbatches: int
    total_rows: int  # over all replicas


class Batch(NamedTuple):
    """What this rank knows of the batch; zeros where it holds neither inputs nor targets."""

    signature: int = 0
    rows: int = 0
    target_rows: int = 0
    microbatches: int = 0


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
    """The collective at the start of each step.

    Parameters
    ----------
    pipe : private communicator over the pipe
    replicas : private communicator over the ranks with the same stages, or None
    """

    def __init__(self, pipe, replicas):
        self.pipe, self.replicas = pipe, replicas
        self.calls = 0
        self.table = np.zeros((pipe.size, 7), np.int64)
        self.replica_table = np.zeros((replicas.size if replicas else 1, 3), np.int64)

    def reach(self, mode: str, batch: Batch, error: Exception | None) -> Agreed:
        """Agree on one step; raises the same error on every rank when a rank has one or when they differ."""
        self.calls += 1
        facts = np.array([error is not None, MODES.index(mode), self.calls, *batch], np.int64)
        wait(self.pipe.Iallgather(facts, self.table))
        table = self.table.tolist()
        failed = any(row[0] for row in table) or any(row[1:3] != table[0][1:3] for row in table)
        signature, rows, target_rows, microbatches = (max(column) for column in list(zip(*table))[3:])
        failed = failed or (target_rows > 0 and target_rows != rows)
        if self.replicas is not None:
            facts = np.array([failed, MODES.index(mode), rows], np.int64)
            wait(self.replicas.Iallgather(facts, self.replica_table))
            others = self.replica_table.tolist()
            failed = any(row[0] for row in others) or any(row[1] != others[0][1] for row in others)
            rows = sum(row[2] for row in others)
        if failed:
            self._explain(mode, error, rows, target_rows)
        return Agreed(signature, microbatches, rows)

    def _explain(self, mode, error, rows, target_rows):
        """The slow path: exchange what went wrong in words, and raise it everywhere."""
        if error is not None and not isinstance(error, MpipipeError):
            error = ArgumentError(f"{type(error).__name__}: {error}")
        if error is not None and error.rank is None:
            error.rank = self.pipe.rank
        entries = self.pipe.allgather((error, mode, self.calls))
        me = self.pipe.rank
        if self.replicas is not None:
            blocks = self.replicas.allgather(entries)
            me += self.replicas.rank * self.pipe.size
            entries = [entry for block in blocks for entry in block]
        failed = [(rank, problem) for rank, (problem, _, _) in enumerate(entries) if problem is not None]
        if not failed and target_rows > 0 and target_rows != rows:
            problem = MismatchError(
                "inputs and targets have different numbers of rows",
                found=f"{target_rows} rows of targets", expected=f"{rows}, as the inputs have",
            )
            failed = [(0, problem)]
        elif not failed:
            modes = [f"{kind} (call {calls})" for _, kind, calls in entries]
            other = next(index for index, kind in enumerate(modes) if kind != modes[0])
            problem = MismatchError(
                "ranks call different methods of the pipeline",
                found=f"rank {other}: {modes[other]}",
                expected=f"rank 0: {modes[0]}",
                remedy="call step, evaluate and forward on all ranks, in the same order",
            )
            failed = [(0, problem)]
        raise_everywhere(me, failed)
