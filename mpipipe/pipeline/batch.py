"""The batch of a call, checked and cut on the ranks that hold inputs or targets; and the call."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Download, Forked, Structure, Tree, flatten, read_only, unflatten
from mpipipe.comm import Lease, check_sendable
from mpipipe.errors import ArgumentError, MpipipeError, PeerError, StageError
from mpipipe.nn import Pending, Position, Saved
from mpipipe.pipeline.plan import ActionPlan
from mpipipe.pipeline.units import AskedSlices, Slicing, rows_of_any, split
from mpipipe.schedules import Schedule
from mpipipe.text import counted

KEPT_SIGNATURES = 64
UNSAID = 0
ROWS = 1
ENTRIES = 2
STEPS = ("step", "forward_train")  # calls that begin a training step, with all of its micro-batches


# A batch, its micro-batches, a function that gives them by their numbers, or nothing on this rank.
Batched: TypeAlias = "Tree | list[Tree] | Callable[[int], Tree] | None"
# The value of a loss: a number, or an array without axes on the GPU.
Value: TypeAlias = "float | Array"
T = TypeVar("T")


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


class BatchReader:
    """Checks and cuts the batches of one rank.

    Where `loss.mean_over_entries` is true, targets count by their entries, else by their rows.
    `bare` is whether a stage of this rank has a backward and does not show its gradients. `names`
    are those that inputs must have besides the main array; None where the first stage does not say.
    `slicing` is how micro-batches are cut into slices.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        loss: LossFunction | None,
        bare: bool = False,
        names: Collection[str] | None = None,
        slicing: Slicing | None = None,
    ):
        self.slicing = slicing or Slicing()
        self.schedule = schedule
        self.has_loss = loss is not None
        self.rank = rank
        self.over_batch = bool(getattr(loss, "over_batch", False))
        over_entries = getattr(loss, "mean_over_entries", None)
        self.mean_over = UNSAID
        if over_entries is not None:
            self.mean_over = ROWS
        if over_entries:
            self.mean_over = ENTRIES
        self.bare = bare
        self.trains = not schedule.forwards_only
        self.names = names
        self.first_rank = schedule.placement[0]
        self.last_rank = schedule.placement[-1]
        self.signatures: dict[tuple, int] = {}

    def read(self, call: str, inputs: Batched, targets: Batched) -> Batch:
        """Return the batch of a call; raises ArgumentError if it is wrong."""
        if call in STEPS and not self.trains:
            raise ArgumentError(
                "a schedule without backward passes cannot train",
                found=self.schedule.name,
                remedy="use evaluate or forward, or another schedule",
            )
        holds_inputs = self.rank == self.first_rank
        holds_targets = self.rank == self.last_rank and call in ("step", "evaluate")
        check_place("inputs", inputs, holds_inputs, f"rank {self.first_rank}, which holds stage 0")
        check_place(
            "targets", targets, holds_targets, f"rank {self.last_rank}, which holds the last stage"
        )
        if holds_targets and not self.has_loss:
            raise ArgumentError(
                "no loss on the rank of the last stage",
                rank=self.rank,
                stage=self.schedule.stages - 1,
                remedy="pass loss=... to Pipeline, for example mpipipe.nn.mean_squared_error",
            )
        batch = Batch(BatchFacts(bare=self.bare))
        if holds_inputs:
            batch = self._with_inputs(batch, call, inputs)
        if holds_targets:
            batch = self._with_targets(batch, call, targets)
        return batch

    def _with_inputs(self, batch: Batch, call: str, inputs: Batched) -> Batch:
        cut, rows = self._cut(call, "inputs", inputs)
        listed = isinstance(inputs, list) or callable(inputs)
        if self.names is not None and (self.names or type(inputs) is not np.ndarray):
            self._check_names(cut, self.names)
        facts = batch.facts._replace(
            signature=self._signature(inputs, cut),
            rows=_compared(inputs, rows),
            microbatches=len(rows),
            listed=listed,
        )
        return batch._replace(facts=facts, inputs=self.slicing.units(cut))

    def _with_targets(self, batch: Batch, call: str, targets: Batched) -> Batch:
        cut, rows = self._cut(call, "targets", targets)
        counts: Sequence[float]
        parts = targets
        if callable(targets):
            parts = cut
        counts, counted_rows, entries, uneven = self._count(parts, rows)
        if self.slicing.count > 1:
            counts = self.slicing.counts(counts, cut)
            uneven = True
        facts = batch.facts._replace(
            target_rows=_compared(targets, rows),
            counted=sum(counted_rows),
            entries=entries,
            mean_over=self.mean_over,
            uneven=uneven,
        )
        return batch._replace(facts=facts, targets=self.slicing.units(cut), counts=counts)

    @staticmethod
    def _check_names(inputs: list[Tree] | AskedBatch, names: Collection[str]) -> None:
        """Raise ArgumentError unless each micro-batch has the names that layers take."""
        if isinstance(inputs, AskedBatch):
            specs = inputs.specs[:1]
        else:
            specs = [MessageSpec.of(tree) for tree in inputs]
        for spec in specs:
            names_given = set()
            if isinstance(spec.structure, Forked):
                for name, *_ in spec.structure.parts:
                    names_given.add(name)
            names_given.discard("")
            missing = sorted({*names} - names_given)
            unused = sorted(names_given - {*names})
            if not missing and not unused:
                continue
            message = f"no layer takes {', '.join(unused)}, which the inputs have"
            if missing:
                message = f"the inputs lack {', '.join(missing)}, which a layer takes"
            raise ArgumentError(
                message,
                found=_branches_with(names_given) or "no Branches",
                expected=_branches_with(names) or "no names",
                remedy="mpipipe.Branches(x, name=...), with a name for each that layers take "
                "and none before gives",
            )

    def _count(self, targets: object, rows: list[int]) -> tuple[list[int], list[int], int, bool]:
        """Count what each micro-batch weighs, its rows, and all entries.

        The last value is true if rows of some micro-batches have more entries than rows of others.
        """
        if isinstance(targets, AskedBatch):
            entries = [spec.entries for spec in targets.specs]
        elif isinstance(targets, list):
            entries = [_entries(target) for target in targets]
        else:
            entries_of_row = _entries(targets) // sum(rows)
            entries = [entries_of_row * count for count in rows]
        uneven = False
        if isinstance(targets, (AskedBatch, list)):
            for size, count in zip(entries, rows):
                if size * rows[0] != entries[0] * count:
                    uneven = True
        if 0 in rows:
            if self.mean_over == ROWS:
                raise ArgumentError(
                    "the loss is a mean over rows, and the targets of a micro-batch share no axis "
                    "of rows",
                    remedy="return (value, doutput, weight), and set no mean_over_entries",
                )
            rows = entries
            uneven = True
        counts = rows
        if self.mean_over == ENTRIES:
            counts = entries
        if self.over_batch:  # there is one value, which counts as all micro-batches together do
            return [sum(counts), *[0] * (len(counts) - 1)], rows, sum(entries), False
        return counts, rows, sum(entries), uneven

    def _cut(
        self, call: str, name: str, batch: Batched
    ) -> tuple[list[Tree] | AskedBatch, list[int]]:
        microbatches = self.schedule.microbatches
        if callable(batch):
            lazy = AskedBatch(name, batch, microbatches, self.rank, may_be_fewer=call == "forward")
            return lazy, lazy.rows
        if call == "forward" and isinstance(batch, list):
            microbatches = max(1, min(microbatches, len(batch)))
        elif call not in STEPS and not isinstance(batch, list):
            microbatches = max(1, min(microbatches, rows_of_any(batch)))
        return split(batch, microbatches)

    def _signature(self, inputs: Batched, cut: list[Tree] | AskedBatch) -> int:
        """Return a number from 1 to 2^62 for shapes and dtypes, the same in every process."""
        listed: object = isinstance(inputs, list)
        facts = []
        if isinstance(cut, AskedBatch):
            facts.append((cut.specs[0].structure, cut.specs[0].leaves))
            listed = tuple(cut.rows)
        else:
            trees = [inputs]
            if listed:
                trees = cut
            for tree in trees:
                leaves, structure = flatten(tree)
                facts.append((structure, kinds_of(leaves)))
        key = listed, tuple(facts)
        if key not in self.signatures:
            if len(self.signatures) == KEPT_SIGNATURES:
                self.signatures.clear()
            named = []
            for structure, kinds in facts:
                named.append((structure, [(shape, kind.name) for shape, kind in kinds]))
            content = repr((key[0], named)).encode("utf-8", "backslashreplace")
            number = int.from_bytes(blake2b(content, digest_size=8).digest(), "big")
            self.signatures[key] = number % (1 << 62) + 1
        return self.signatures[key]


def _branches_with(names: Collection[str]) -> str:
    if not names:
        return ""
    return f"Branches with {', '.join(sorted(names))}"


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


def _compared(batch: Batched, rows: Sequence[int]) -> int:
    """Return the rows to compare between inputs and targets; 0 for a list, cut by the user."""
    if isinstance(batch, list) or 0 in rows:
        return 0
    return sum(rows)


def _entries(tree: Tree) -> int:
    """How many numbers the arrays of a tree have."""
    if type(tree) is np.ndarray:
        return tree.size
    return sum(leaf.size for leaf in flatten(tree)[0])


def kinds_of(leaves: Sequence[Array]) -> tuple[tuple[arrays.Shape, np.dtype], ...]:
    """Return (shape, dtype) of each array."""
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves)


class MessageSpec:
    """The arrays of one micro-batch on one edge.

    `structure` is that of the tree, `leaves` are (shape, dtype) of each array, `gradients` of those
    with one.
    """

    __slots__ = ("floating", "gradients", "leaves", "structure")

    def __init__(self, structure: Structure, leaves: Sequence[tuple[arrays.Shape, np.dtype]]):
        self.structure = structure
        self.leaves = tuple(leaves)
        self.floating = [arrays.is_floating(kind) for _, kind in self.leaves]
        self.gradients = self.with_gradients(self.leaves)

    def with_gradients(self, items: Sequence[T]) -> tuple[T, ...]:
        """Return the items, one for each leaf, of leaves that have a gradient."""
        return tuple(compress(items, self.floating))

    @classmethod
    def of(cls, tree: Tree) -> MessageSpec:
        """Return the spec of `tree`; raises ArgumentError if a leaf cannot be sent."""
        leaves, structure = flatten(tree)
        for leaf in leaves:
            check_sendable(leaf)
        return cls(structure, kinds_of(leaves))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessageSpec) and (self.structure, self.leaves) == (
            other.structure,
            other.leaves,
        )

    __hash__ = None  # type: ignore[assignment]  # compared, never a key

    def matches(self, tree: Tree) -> bool:
        """Whether `tree` has this spec and can be sent as it is."""
        if self.structure is None:  # the common case, on the hot path
            shape, kind = self.leaves[0]
            if type(tree) is np.ndarray:
                return tree.shape == shape and tree.dtype == kind and tree.flags.c_contiguous
            if not arrays.is_array(tree):
                return False
        return MessageSpec.of(tree) == self

    @property
    def is_one_array(self) -> bool:
        """True for one array of floating numbers, so that its gradient is one, too."""
        return self.structure is None and all(self.floating)

    @property
    def entries(self) -> int:
        """How many numbers the arrays have."""
        return sum(prod(shape) for shape, _ in self.leaves)

    def __str__(self) -> str:
        return ", ".join(f"{kind.name}{list(shape)}" for shape, kind in self.leaves)

    def encode(self) -> bytes:
        return json.dumps(
            [self.structure, [[kind.name, shape] for shape, kind in self.leaves]]
        ).encode()

    @classmethod
    def decode(cls, content: bytes) -> MessageSpec:
        structure, leaves = json.loads(content)
        if isinstance(structure, list):
            structure = tuple(structure)
        return cls(structure, [(tuple(shape), arrays.dtype(name)) for name, shape in leaves])

    def gradient_tree(self, received: Sequence[Array]) -> Tree:
        """Return received gradients in the structure of the activation, None if a leaf has none."""
        leaves: list[Array | None] = []
        source = iter(received)
        for floating in self.floating:
            leaf = None
            if floating:
                leaf = next(source)
            leaves.append(leaf)
        return unflatten(leaves, self.structure)

    def gradient_leaves(
        self, tree: Tree, what: str = "an input gradient", like: str = "its input"
    ) -> list:
        """Return the arrays of a gradient in C order; raise ArgumentError if it does not fit."""
        if self.structure is None and self.gradients and self.matches(tree):
            return [tree]
        leaves: list = [None]
        structure: Structure = None
        if tree is not None:
            leaves, structure = flatten(arrays.in_c_order(tree))
        if structure != self.structure:
            raise ArgumentError(
                f"{what} has another structure than {like}",
                found=structure,
                expected=self.structure,
            )
        floating_leaves = list(self.with_gradients(leaves))
        for leaf, (shape, kind) in zip(floating_leaves, self.gradients):
            is_array = arrays.is_array(leaf)
            if not is_array or leaf.shape != shape or leaf.dtype != kind:
                found = type(leaf).__name__
                if is_array:
                    found = f"{leaf.dtype.name}{list(leaf.shape)}"
                raise ArgumentError(
                    f"{what} does not match {like}",
                    found=found,
                    expected=f"{kind.name}{list(shape)}",
                )
            check_sendable(leaf)
        return floating_leaves


def owned(tree: Tree) -> Tree:
    """Return read-only copies: a function may fill the same arrays again."""
    return read_only(arrays.mapped(arrays.copied, tree))


class AskedBatch:
    """The micro-batches that a user's function gives, each when it is asked for, and not kept.

    The first is asked for at once: the ranks agree on its shapes, and all others must have the
    same. Their numbers of rows may differ where an attribute `rows` of the function says how many
    each has.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[int], Tree],
        microbatches: int,
        rank: int,
        may_be_fewer: bool,
    ) -> None:
        self._name = name
        self._function = function
        self._rank = rank
        with self._locating(0):
            first = owned(function(0))
            rows = rows_of_any(first)
        leaves, structure = flatten(first)
        row_counts = getattr(function, "rows", None)
        self.rows = [rows] * microbatches
        if row_counts is not None:
            self.rows = [int(count) for count in np.atleast_1d(row_counts)]
        fewest = microbatches
        if may_be_fewer:
            fewest = 1
        is_right = fewest <= len(self.rows) <= microbatches
        if not is_right or (row_counts is not None and (rows == 0 or min(self.rows) < 1)):
            raise ArgumentError(
                f"the rows of the micro-batches that {name} gives",
                found=self.rows,
                expected=f"{counted(microbatches, 'number')} of at least 1",
            )
        specs = {}
        for count in {*self.rows}:
            kinds = []
            for shape, dtype in kinds_of(leaves):
                if rows:
                    shape = (count, *shape[1:])
                kinds.append((shape, dtype))
            specs[count] = MessageSpec(structure, kinds)
        self.specs = [specs[count] for count in self.rows]
        if self.rows[0] != rows:
            first = self._checked(0, first)
        self._first: Tree = first

    def __getitem__(self, microbatch: int) -> Tree:
        if microbatch == 0 and self._first is not None:
            tree = self._first
            self._first = None
            return tree
        try:  # the context below costs a microsecond
            tree = self._function(microbatch)
            if type(tree) is np.ndarray and self.specs[microbatch].matches(tree):
                return owned(tree)
        except Exception as error:
            with self._locating(microbatch):
                raise error
        return self._checked(microbatch, tree)

    def _checked(self, microbatch: int, tree: Tree) -> Tree:
        """Return a micro-batch, read-only; raises ArgumentError if it is not as was agreed."""
        with self._locating(microbatch):
            actual = MessageSpec.of(tree)
            expected = self.specs[microbatch]
            if actual != expected:
                raise ArgumentError(
                    "another shape, dtype or structure than was agreed on at the start of the call",
                    found=actual,
                    expected=f"{expected}, by the shapes of micro-batch 0",
                    remedy="give micro-batches of equal shapes, or a list of all of them in place "
                    "of the function; or with other numbers of rows than the first, say how many "
                    "each has in an attribute `rows`",
                )
            return owned(tree)

    @contextmanager
    def _locating(self, microbatch: int) -> Iterator[None]:
        """Let errors name their micro-batch; those of the function become a StageError."""
        try:
            yield
        except PeerError:
            raise
        except MpipipeError as error:
            error.message = f"{self._name}({microbatch}): {error.message}"
            error.rank = self._rank
            error.microbatch = microbatch
            raise
        except Exception as error:
            raise StageError(
                f"{self._name}({microbatch}) raised {type(error).__name__}: {error}",
                rank=self._rank,
                microbatch=microbatch,
            ) from error


# The inputs or targets of a call, by unit.
Units: TypeAlias = "list[Tree] | AskedBatch | AskedSlices"


# -- One call on this rank: what it is to do, what it holds while it runs, its results -------------


@dataclass(slots=True)
class Call:
    """One call; without slices a unit is a micro-batch."""

    name: str
    number: int  # on all ranks; messages have names within it
    title: str  # with number and pipeline
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
    # What stays on this rank between two stages, by (edge, unit, "F" or "B").
    local: dict[tuple[int, int, str], Tree] = field(default_factory=dict)
    # (output, target) by unit, until a loss over the batch has all of them.
    awaiting: dict[int, tuple[Tree, Tree]] = field(default_factory=dict)
    loss_gradients: dict[int, Tree] = field(default_factory=dict)
    # Units whose losses are on the GPU, and their copies to the host.
    download: tuple[list[int], Download] | None = None

    # Results by unit.
    losses: dict[int, Value] = field(default_factory=dict)
    outputs: dict[int, Tree] = field(default_factory=dict)
    input_gradients: dict[int, Tree] = field(default_factory=dict)
