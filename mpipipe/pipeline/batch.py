"""The batch of a call: checked and cut on the ranks that hold inputs or targets."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

from mpipipe.arrays import Tree
from mpipipe.arrays.trees import flatten
from mpipipe.errors import ArgumentError
from mpipipe.pipeline.microbatches import rows_of, split
from mpipipe.schedules import Schedule
from mpipipe.schedules.distributed_proof import trains

KEPT_SIGNATURES = 64


class BatchFacts(NamedTuple):
    """What this rank knows of the batch; zeros where it holds neither inputs nor targets."""

    signature: int = 0  # the same for inputs of the same shapes
    rows: int = 0
    target_rows: int = 0
    microbatches: int = 0
    listed: int = 0  # whether the inputs came as a list of micro-batches


class Batch(NamedTuple):
    """Inputs and targets of this rank, by micro-batch; None if it holds none. `rows`: of each target."""

    facts: BatchFacts = BatchFacts()
    inputs: list[Tree] | None = None
    targets: list[Tree] | None = None
    rows: list[int] | None = None


class BatchReader:
    """Checks and cuts the batches of one rank.

    Parameters
    ----------
    schedule, rank : which say where inputs and targets belong
    has_loss : whether this rank was given a loss
    """

    def __init__(self, schedule: Schedule, rank: int, has_loss: bool):
        self.schedule, self.has_loss, self.rank = schedule, has_loss, rank
        self.first_rank, self.last_rank = schedule.placement[0], schedule.placement[-1]
        self.trains = trains(schedule)
        self.signatures: dict[Any, int] = {}

    def read(self, call: str, inputs: Any, targets: Any) -> Batch:
        """Return the batch of a call ("step", "evaluate" or "forward"); raises ArgumentError if it is wrong."""
        if call == "step" and not self.trains:
            raise ArgumentError(
                "a schedule without backward passes cannot train",
                found=self.schedule.name,
                remedy="use evaluate or forward, or another schedule",
            )
        holds_inputs = self.rank == self.first_rank
        holds_targets = self.rank == self.last_rank and call != "forward"
        check_present("inputs", inputs, holds_inputs, f"rank {self.first_rank}, which holds stage 0")
        check_present("targets", targets, holds_targets, f"rank {self.last_rank}, which holds the last stage")
        if holds_targets and not self.has_loss:
            raise ArgumentError(
                "no loss on the rank of the last stage",
                rank=self.rank,
                stage=self.schedule.stages - 1,
                remedy="pass loss=... to Pipeline, for example mpipipe.nn.mean_squared_error",
            )
        facts, cut_inputs, cut_targets, target_rows = BatchFacts(), None, None, None
        if holds_inputs:
            cut_inputs, rows = self._cut(call, inputs)
            facts = BatchFacts(self._signature(inputs), sum(rows), 0, len(rows), isinstance(inputs, list))
        if holds_targets:
            cut_targets, target_rows = self._cut(call, targets)
            facts = facts._replace(target_rows=sum(target_rows))
        return Batch(facts, cut_inputs, cut_targets, target_rows)

    def _cut(self, call: str, batch: Any) -> tuple[list[Tree], list[int]]:
        microbatches = self.schedule.microbatches
        if call == "forward" and isinstance(batch, list):
            microbatches = max(1, min(microbatches, len(batch)))
        elif call != "step" and not isinstance(batch, list):
            microbatches = max(1, min(microbatches, rows_of(batch)))
        return split(batch, microbatches)

    def _signature(self, batch: Any) -> int:
        """A number from 1 to 2^62 for the shapes and dtypes of a batch, the same in every process."""
        facts: list = [isinstance(batch, list)]
        for tree in batch if isinstance(batch, list) else [batch]:
            leaves, structure = flatten(tree)
            facts.append((structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)))
        key = tuple(facts)
        if key not in self.signatures:
            if len(self.signatures) == KEPT_SIGNATURES:
                self.signatures.clear()
            named = [(structure, [(shape, kind.name) for shape, kind in leaves]) for structure, leaves in facts[1:]]
            content = repr((facts[0], named)).encode("utf-8", "backslashreplace")
            number = int.from_bytes(blake2b(content, digest_size=8).digest(), "big")
            self.signatures[key] = number % (1 << 62) + 1
        return self.signatures[key]


def check_present(name: str, value: Any, wanted: bool, where: str) -> None:
    """Raise ArgumentError unless inputs, or targets, are there on one rank and nowhere else."""
    if wanted and value is None:
        raise ArgumentError(f"{name} are missing", found="None", expected=f"{name} on {where}")
    if not wanted and value is not None:
        raise ArgumentError(
            f"{name} on the wrong rank",
            found=type(value).__name__,
            expected=f"None here; {name} only on {where}",
            remedy=f"pass {name}=None on this rank",
        )
