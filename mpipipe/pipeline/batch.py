"""The batch of a call, checked and cut on the ranks that hold inputs or targets; and the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeAlias

from mpipipe.arrays import Array, Download, Tree
from mpipipe.comm import Lease
from mpipipe.errors import ArgumentError
from mpipipe.nn import Pending, Position, Saved
from mpipipe.pipeline.plan import ActionPlan
from mpipipe.pipeline.units import (
    AskedBatch,
    Batched,
    Microbatches,
    Slicing,
    Units,
    rows_of_any,
    split,
)
from mpipipe.schedules import Schedule

UNSAID = 0
ROWS = 1
ENTRIES = 2
STEPS = ("step", "forward_train")  # calls that begin a training step, with all of its micro-batches

# The value of a loss: a number, or an array without axes on the GPU.
Value: TypeAlias = "float | Array"


class LossFunction(Protocol):
    """A loss, called with the output of the last stage and its target for each micro-batch.

    It may have two attributes: `mean_over_entries`, what a micro-batch counts by, and `over_batch`,
    whether it is called once for all micro-batches. See `loss` of `Pipeline`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return (value, gradient of the output), or (value, gradient of the output, weight).

        The arguments are output and target, arrays or trees of them, and `factor=` where it has
        that parameter: the gradient is multiplied by it before it is rounded.
        """


class BatchFacts(NamedTuple):
    """What this rank knows of a batch, or what all ranks agreed on.

    It has zeros where the rank holds neither inputs nor targets.

    After the agreement `counted` and `entries` are of all replicas, and the last two are true where
    any rank says so.
    """

    signature: int = 0  # the same for inputs of the same shapes
    rows: int = 0  # rows of the inputs; 0 for a list, whose micro-batches may have any shapes
    microbatches: int = 0
    listed: int = 0  # whether the inputs came as a list of micro-batches
    target_rows: int = 0  # the same of the targets
    # Rows of the targets, also in a list; their entries where arrays of one share no axis of rows.
    counted: int = 0
    entries: int = 0  # entries of all targets
    mean_over: int = 0  # UNSAID, ROWS or ENTRIES: the loss is a mean over them
    uneven: int = 0  # whether rows of one micro-batch have more entries than those of another
    bare: int = 0  # whether a stage does not show its gradients

    @property
    def total(self) -> int:
        """What the loss is a mean over: entries of the targets, or rows."""
        if self.mean_over == ENTRIES:
            return self.entries
        return self.counted


class Batch(NamedTuple):
    """Inputs and targets of this rank, by unit; None if it holds none.

    `counts` are the rows or entries of each unit.
    """

    facts: BatchFacts = BatchFacts()
    inputs: Units | None = None
    targets: Units | None = None
    counts: Sequence[float] | None = None


def _numbering() -> Callable[[Any], int]:
    """Return a function that gives each key a number; no other key has had it."""
    numbers = count(1)
    return lru_cache(maxsize=64)(lambda key: next(numbers))


@dataclass
class BatchReader:
    """Checks and cuts the batches of one rank.

    Where `loss.mean_over_entries` is true, targets count by their entries, else by their rows.
    `bare` is whether a stage of this rank has a backward and does not show its gradients.
    `slicing` is how micro-batches are cut into slices.
    """

    schedule: Schedule
    rank: int
    loss: LossFunction | None
    bare: bool = False
    slicing: Slicing = field(default_factory=Slicing)
    # Numbers the specs of the inputs, by the key of micro-batches.
    signature: Callable[[Any], int] = field(default_factory=_numbering)

    def read(self, call: str, inputs: Batched, targets: Batched) -> Batch:
        """Return the batch of a call; raises ArgumentError if it is wrong."""
        if call in STEPS and self.schedule.forwards_only:
            raise ArgumentError(
                "a schedule without backward passes cannot train",
                found=self.schedule.name,
                remedy="use evaluate or forward, or another schedule",
            )
        first_rank = self.schedule.placement[0]
        last_rank = self.schedule.placement[-1]
        holds_inputs = self.rank == first_rank
        holds_targets = self.rank == last_rank and call in ("step", "evaluate")
        check_place("inputs", inputs, holds_inputs, f"rank {first_rank}, which holds stage 0")
        check_place(
            "targets", targets, holds_targets, f"rank {last_rank}, which holds the last stage"
        )
        if holds_targets and self.loss is None:
            raise ArgumentError(
                "no loss on the rank of the last stage",
                rank=self.rank,
                stage=self.schedule.stages - 1,
                remedy="pass loss=... to Pipeline, for example mpipipe.nn.mean_squared_error",
            )
        facts = BatchFacts(bare=self.bare)
        input_units = None
        target_units = None
        counts = None
        if holds_inputs:
            parts = self._cut(call, "inputs", inputs)
            input_units = parts.units
            facts = facts._replace(
                signature=self.signature(parts.key),
                rows=_compared(inputs, parts),
                microbatches=len(parts.rows),
                listed=isinstance(inputs, list) or callable(inputs),
            )
        if holds_targets:
            parts = self._cut(call, "targets", targets)
            target_units = parts.units
            counts, facts = self._count(parts, facts)
            facts = facts._replace(target_rows=_compared(targets, parts))
        return Batch(facts, input_units, target_units, counts)

    def _cut(self, call: str, name: str, batch: Batched) -> Microbatches:
        microbatches = self.schedule.microbatches
        if callable(batch):
            asked = AskedBatch(name, batch, self.rank, self.slicing)
            spec = asked.spec
            assert spec is not None  # micro-batch 0 has set it
            return Microbatches(asked, [spec] * microbatches, [spec.rows] * microbatches, spec)
        if call == "forward" and isinstance(batch, list):
            microbatches = max(1, min(microbatches, len(batch)))
        elif call not in STEPS and not isinstance(batch, list):
            microbatches = max(1, min(microbatches, rows_of_any(batch)))
        return split(batch, microbatches, self.slicing)

    def _count(self, parts: Microbatches, facts: BatchFacts) -> tuple[list[float], BatchFacts]:
        """Count what each unit weighs, and say of all targets what `facts` is to know."""
        over_entries = getattr(self.loss, "mean_over_entries", None)
        mean_over = {None: UNSAID, False: ROWS}.get(over_entries, ENTRIES)
        rows = parts.rows
        entries = [spec.entries for spec in parts.specs]
        uneven = any([size * rows[0] != entries[0] * row for size, row in zip(entries, rows)])
        if 0 in rows:
            if mean_over == ROWS:
                raise ArgumentError(
                    "the loss is a mean over rows, and the targets of a micro-batch share no axis "
                    "of rows",
                    remedy="return (value, doutput, weight), and set no mean_over_entries",
                )
            rows = entries
            uneven = True
        counts: list[float] = [*rows]
        if mean_over == ENTRIES:
            counts = [*entries]
        # There is one value, which counts as all micro-batches together do.
        if getattr(self.loss, "over_batch", False):
            counts = [sum(counts), *[0] * (len(counts) - 1)]
            uneven = False
        if self.slicing.count > 1:
            counts = self.slicing.counts(counts, parts.specs)
            uneven = True
        return counts, facts._replace(
            counted=sum(rows), entries=sum(entries), mean_over=mean_over, uneven=uneven
        )


def check_place(name: str, value: object, wanted: bool, where: str) -> None:
    """Raise ArgumentError where a value is missing, or is given on a rank that wants none."""
    if wanted and value is None:
        raise ArgumentError(f"{name} are missing", found="None", expected=f"{name} on {where}")
    if not wanted and value is not None:
        raise ArgumentError(
            f"{name} on the wrong rank",
            found=type(value).__name__,
            expected=f"None here; {name} only on {where}",
            remedy=f"pass {name}=None on this rank",
        )


def _compared(batch: Batched, parts: Microbatches) -> int:
    """Return the rows to compare between inputs and targets; 0 for a list, cut by the user."""
    if isinstance(batch, list) or 0 in parts.rows:
        return 0
    return sum(parts.rows)


# -- One call on this rank: what it is to do, what it holds while it runs, its results -------------


@dataclass(slots=True)
class Call:
    """One call; without slices a unit is a micro-batch."""

    name: str
    # The same on all ranks; messages have names within it.
    number: int
    title: str  # name, number and pipeline, for errors
    plan: ActionPlan
    agreed: BatchFacts  # facts of the batch that all ranks know
    training: bool  # True if backwards follow
    inputs: Units  # only on the rank of the first stage
    targets: Units | None  # only on the rank of the last stage; None if no loss is wanted
    wants_outputs: bool
    scale: float  # factor on all gradients
    positions: list[Position]  # for layers that draw or attend to earlier slices
    marks: list = field(default_factory=list)  # two marks of the clock for each action

    # From an action to a later one, by (stage, unit), with the lease on received arrays.
    saved: dict[tuple[int, int], tuple[Saved, Lease]] = field(default_factory=dict)
    pending: dict[tuple[int, int], tuple[Pending, Lease]] = field(default_factory=dict)
    # What stays on this rank between two stages, by (edge, unit, whether it is an activation).
    local: dict[tuple[int, int, bool], Tree] = field(default_factory=dict)
    # (output, target) by unit, until a loss over the batch has all of them.
    awaiting: dict[int, tuple[Tree, Tree]] = field(default_factory=dict)
    loss_gradients: dict[int, Tree] = field(default_factory=dict)
    # Units whose losses are on the GPU, and their copies to the host.
    download: tuple[list[int], Download] | None = None

    # Results by unit.
    losses: dict[int, Value] = field(default_factory=dict)
    outputs: dict[int, Tree] = field(default_factory=dict)
    input_gradients: dict[int, Tree] = field(default_factory=dict)
