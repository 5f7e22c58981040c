"""Check mode (`Pipeline(check=True)`) finds the first array that is not finite or is written to.

    forward   x -> y        x as it was; y finite                           y watched from here ...
    message   y -> x        x finite, as the sender found y
    loss      y -> dy       y and targets as they were; dy finite
    backward  dy -> dx      x, dy and saved as they were; gradients and dx finite   ... to here

Stages, losses and messages are wrapped then, by classes that look at what goes in and comes out.
Checksums tell whether an array was written to. Each array is looked at a few times: results after
the next actions of the rank, where a buffer that is used again shows; what was saved, when its
backward begins; the batch at the end of the call.

With a `scale` other than 1 gradients may overflow: an optim.LossScaler looks for that. They are not
looked at then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Tree
from mpipipe.comm import BACKWARD, Envelope, Lease
from mpipipe.errors import NonFiniteError, StageError
from mpipipe.nn import HeadCrossEntropy, Saved
from mpipipe.pipeline.attached import AttachedStage
from mpipipe.pipeline.batch import Call, LossFunction
from mpipipe.pipeline.loss import check_finite, checked_weight
from mpipipe.pipeline.messages import StageMessages
from mpipipe.stages import named_arrays
from mpipipe.text import counted

OWN_ARRAYS = (
    "write into arrays of your own: x.copy(), dy.copy(), and a new y and dx for each micro-batch"
)
RECENT = 8  # results of stages that are looked at after each action
OVERFLOW = (
    "look for a division by 0, a log or sqrt out of range, an overflow of exp or of a "
    "product, a step too large"
)
SOURCE = "look at what is named last in `found`: it was so before"
ON_ITS_WAY = (
    "it was finite when it was sent: it was written to after that, or changed on its way. "
    "MPIPIPE_SYNC_SENDS=1, and with GPUs MPIPIPE_GPU_DIRECT=0, may tell which"
)
RETURNED = "was written to after its stage had returned it"
# What a stage saved, and its micro-batch.
Kept: TypeAlias = "tuple[Saved, int]"
# (what it is, arrays) of all that a result was computed from.
Sources: TypeAlias = "Sequence[tuple[str, object]]"


# -- What is seen in arrays: entries that are not finite, and checksums ----------------------------


def non_finite(value: object, name: str) -> str | None:
    """Describe the first array that is not finite; None if all are."""
    for leaf, array in arrays.named_leaves(value, name):
        if arrays.is_floating(array.dtype):
            host = arrays.on_host(array)
            finite = np.isfinite(host)
            if not finite.all():
                first = np.unravel_index(int(np.argmin(finite)), host.shape)
                nans = int(np.isnan(host).sum())
                wrong = host.size - int(np.count_nonzero(finite))
                at = ""
                if host.ndim:
                    at = f" at [{', '.join(map(str, first))}]"
                return (
                    f"{leaf}, {_described(array)}: {wrong} of {counted(host.size, 'number')} not "
                    f"finite ({nans} NaN, {wrong - nans} infinite), the first{at}: {host[first]}"
                )
    return None


def first_source(sources: Sources) -> str:
    """Return the end of a sentence about the first array that is not finite; "" if all are."""
    for what, tree in sources:
        description = non_finite(tree, what)
        if description is not None:
            return f"; before that: {description}"
    return ""


@dataclass(slots=True, eq=False)
class Watched:
    """Arrays that must stay as they are, with their checksums."""

    name: str
    stage: int | None
    microbatch: int | None
    leaves: list[tuple[str, Array]]  # (name, array) of each
    sums: list[int]  # the checksum of each

    def change(self) -> str | None:
        """Describe the first array that has been written to; None where all are as they were."""
        for (name, array), before in zip(self.leaves, self.sums):
            if _checksum(array) != before:
                return f"{name}, {_described(array)}, with another checksum than before"
        return None


def watched(
    stage: int | None, microbatch: int | None, value: object, name: str, without: object = ()
) -> Watched:
    """Take the checksums of arrays, without those that share memory with `without`."""
    others = [array for _, array in arrays.named_leaves(without, "")]
    leaves = []
    sums = []
    for leaf, array in arrays.named_leaves(value, name, grown=False):
        if not array.dtype.hasobject and not arrays.shares_any(array, others):
            leaves.append((leaf, array))
            sums.append(_checksum(array))
    return Watched(name, stage, microbatch, leaves, sums)


def _checksum(array: Array) -> int:
    return crc32(np.ascontiguousarray(arrays.on_host(array)).reshape(-1).view(np.uint8).data)


def _described(array: Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"


# -- What is known of the arrays of a call ---------------------------------------------------------


@dataclass(eq=False)
class Checks:
    """Knows the arrays of the call under way on this rank."""

    rank: int
    last_stage: int
    stages: dict[int, CheckedStage] = field(default_factory=dict)
    call: Call | None = None  # under way, or the last one
    # Results that a stage returned last: a buffer that is used again shows in them.
    recent: deque[Watched] = field(default_factory=lambda: deque(maxlen=RECENT))
    # Arrays that the user has, or gets, with what is said of a write to them.
    to_end: list[tuple[Watched, str]] = field(default_factory=list)

    @property
    def gradients(self) -> bool:
        """Whether gradients must be finite."""
        return self.call is not None and self.call.training and self.call.scale == 1

    def begin(self, call: Call) -> None:
        """Begin a call: take the checksums of its batch."""
        self.call = call
        for name, stage, trees in (
            ("inputs", 0, call.inputs),
            ("targets", self.last_stage, call.targets),
        ):
            if isinstance(trees, list):
                what = f"the {name} of a call were written to before its end"
                for position, tree in zip(call.positions, trees):
                    self.to_end.append((watched(stage, position.microbatch, tree, name), what))

    def end(self) -> None:
        """End a call whose actions have ended and whose messages have left."""
        self.look_at_recent("the end of the call")
        for copies, what in self.to_end:
            self.unchanged(copies, what)
        self.recent.clear()
        self.to_end = []

    def look_at_sums(self) -> None:
        """Look at the gradients of a step, after the sums over replicas and tied parameters."""
        what = "the sum of a gradient over replicas, or places of a tied parameter, is not finite"
        for number, stage in self.stages.items():
            self.finite_gradient(stage.named_gradients(), "gradient", what, stage=number)

    def finite_gradient(self, *arguments: Any, **options: Any) -> None:
        """Do what `finite` does, unless gradients may overflow."""
        if self.gradients:
            self.finite(*arguments, **options)

    def finite(
        self,
        tree: object,
        name: str,
        what: str,
        sources: Sources = (),
        remedy: str = OVERFLOW,
        stage: int | None = None,
    ) -> None:
        """Raise NonFiniteError if an array is not finite; name the first source that is not."""
        description = non_finite(tree, name)
        if description is not None:
            source = first_source(sources)
            if source:
                remedy = SOURCE
            raise NonFiniteError(
                what,
                rank=self.rank,
                stage=stage,
                found=f"{description}{source}",
                expected="finite numbers",
                remedy=remedy,
            )

    def unchanged(self, arrays: Watched, what: str) -> None:
        """Raise StageError if an array has been written to."""
        description = arrays.change()
        if description is not None:
            raise StageError(
                what,
                rank=self.rank,
                stage=arrays.stage,
                microbatch=arrays.microbatch,
                found=description,
                expected="the content that it had",
                remedy=OWN_ARRAYS,
            )

    def look_at_recent(self, when: str) -> None:
        """Look at results of earlier actions, which the last one may have written to."""
        for copies in self.recent:
            self.unchanged(copies, f"{copies.name} {RETURNED}, at the latest by {when}")


# -- Stages, losses and messages in check mode -----------------------------------------------------


class CheckedStage:
    """Forward and backward of a stage, with a look at what goes in and comes out.

    What the stage saved goes out and comes back as (saved, micro-batch).
    """

    def __init__(self, stage: AttachedStage, checks: Checks) -> None:
        self.attached = stage
        self.stage = stage.stage
        self.position = self.stage.position
        self.checks = checks
        self.number = stage.number
        self.microbatch = 0  # its number in the action under way
        # By micro-batch, what must be as it was when the next action of the stage comes.
        self.kept: dict[int, dict[str, Watched]] = {}
        checks.stages[self.number] = self

    def forward(self, x: Tree) -> Any:
        checks = self.checks
        position = self.position
        self.microbatch = position.microbatch
        self.stage.position = position
        arrays: dict[str, Watched] = {}
        again = position.recompute == "now"
        if again:
            arrays = self._taken("a forward and its recomputation")
        else:
            arrays["x"] = self._watched("x", x)
        result = self._computed("forward", self.stage.forward, arrays, x)
        if type(result) is not tuple or len(result) != 2:
            return result  # the executor says so
        y, saved = result
        what = "forward returned an output that is not finite"
        checks.finite(y, "y", what, [("the input of this call", x), *self._sources()])
        if not again:
            # A message may still read it, or the user gets it, and no backward looks at it.
            training = checks.call is not None and checks.call.training
            to_end = not position.keeps and (training or self.number == checks.last_stage)
            arrays["y"] = self._returned("y", y, [x], to_end)
        if not position.keeps:
            return y, saved
        if position.recompute != "later":
            arrays["saved"] = self._watched("saved", saved, self.attached.gradient_arrays)
        self.kept[self.microbatch] = arrays
        return y, (saved, self.microbatch)

    def backward(self, dy: Tree, kept: Kept) -> Tree:
        return self._backward("backward", self.stage.backward, dy, kept)[0]

    def backward_input(self, dy: Tree, kept: Kept) -> tuple[Tree, Kept]:
        result, arrays = self._backward("input gradient", self.stage.backward_input, dy, kept)
        dx, pending = result
        # Others add to gradients meanwhile.
        arrays["pending"] = self._watched("pending", pending, self.attached.gradient_arrays)
        self.kept[self.microbatch] = arrays
        return dx, (pending, self.microbatch)

    def backward_weight(self, kept: Kept) -> None:
        pending, self.microbatch = kept
        arrays = self._taken("input gradient and weight gradient")
        del arrays["pending"]  # they are the stage's own
        self._computed("weight gradient", self.stage.backward_weight, arrays, pending)

    def named_gradients(self) -> dict[str, Array]:
        """Return all gradients by name, and the parts of tied ones."""
        named = named_arrays(self.stage, "gradients")
        for inner in self.stage.inner_stages:
            for name, array in inner.buffers.parts.items():
                named[f"{name}, part"] = array
        return named

    def _backward(
        self, action: str, work: Callable[..., Any], dy: Tree, kept: Kept
    ) -> tuple[Any, dict[str, Watched]]:
        """Return what `work` returns, and what it was handed."""
        saved, self.microbatch = kept
        arrays = self._taken("forward and backward")
        del arrays["saved"]  # they are the stage's own, as y is
        y = arrays.pop("y")
        if y in self.checks.recent:
            self.checks.recent.remove(y)
        if self.number == self.checks.last_stage:  # a share, too, may be too large for its dtype
            what = "the gradient of the loss, times the share of its micro-batch, is not finite"
            self.checks.finite_gradient(dy, "dy", what)
        arrays["dy"] = self._watched("dy", dy)
        result = self._computed(action, work, arrays, dy, saved)
        dx = result
        if action != "backward":
            dx = result[0]
        what = f"{action} returned an input gradient that is not finite"
        self.checks.finite_gradient(dx, "dx", what, self._sources())
        self._returned("dx", dx, [dy, dict(arrays["x"].leaves)], self.number == 0)
        return result, arrays

    def _taken(self, between: str) -> dict[str, Watched]:
        """Take what earlier actions kept of the micro-batch; nothing may have written to it."""
        arrays = self.kept.pop(self.microbatch)
        for name, copies in arrays.items():
            what = f"{name} was written to between {between}"
            if name == "y":
                what = f"y {RETURNED}"
            self.checks.unchanged(copies, what)
        return arrays

    def _computed(
        self, action: str, work: Callable[..., Any], arrays: dict[str, Watched], *arguments: object
    ) -> Any:
        """Return what `work` returns; it may write neither to these arrays nor to results."""
        checks = self.checks
        result = work(*arguments)
        for name, copies in arrays.items():
            if name != "y":
                checks.unchanged(copies, f"{action} wrote to {name}, which the stage was handed")
        when = f"{action} of stage {self.number}, micro-batch {self.microbatch}"
        checks.look_at_recent(when)
        if action in ("backward", "weight gradient"):
            what = f"{action} left the gradient of a parameter that is not finite"
            checks.finite_gradient(self.named_gradients(), "gradient", what, self._sources())
        return result

    def _returned(self, name: str, value: Tree, handed: list[object], to_user: bool) -> Watched:
        """Watch what the stage returned, without what it was handed."""
        result = self._watched(name, value, handed)
        self.checks.recent.append(result)
        if to_user:
            self.checks.to_end.append((result, f"{name} {RETURNED}"))
        return result

    def _watched(self, name: str, value: object, without: object = ()) -> Watched:
        return watched(self.number, self.microbatch, value, name, without)

    def _sources(self) -> Sources:
        """Return what results are computed from, besides the input."""
        return [("parameter", named_arrays(self.stage, "parameters"))]


def checked_loss(
    function: LossFunction, checks: Checks, output: Tree, target: Tree, **options: Any
) -> Any:
    """Return what a user's loss returns, with a look at what goes in and comes out."""
    y = watched(None, None, output, "y")
    targets = watched(None, None, target, "targets")
    sources = [("the targets of this call", target)]
    result = function(output, target, **options)
    checks.unchanged(y, "the loss wrote to the output of the last stage")
    checks.unchanged(targets, "the loss wrote to its targets")
    if isinstance(function, HeadCrossEntropy):
        what = "the loss left a gradient of the head that is not finite"
        gradients = checks.stages[checks.last_stage].named_gradients()
        checks.finite_gradient(gradients, "gradient", what, sources)
    # With weight 0 nobody looks at the others.
    is_right = type(result) is tuple and len(result) in (2, 3)
    if is_right and all(map(checked_weight, result[2:])):
        if isinstance(result[0], (float, np.floating)):
            try:
                check_finite(result[0])
            except NonFiniteError as error:
                error.found = f"{error.found}{first_source(sources)}; y is finite"
                raise
        what = "the loss returned a gradient of the output that is not finite"
        checks.finite_gradient(result[1], "doutput", what, sources)
    return result


@dataclass(eq=False, kw_only=True)
class CheckedMessages(StageMessages):
    """Activations and gradients of one rank, with a look at those that arrive."""

    checks: Checks

    def receive(self, envelope: Envelope) -> tuple[Tree, Lease]:
        tree, lease = super().receive(envelope)
        what = f"{envelope.subject} is not finite as it arrived from rank {envelope.peer}"
        if envelope.direction == BACKWARD:
            self.checks.finite_gradient(tree, "dy", what, remedy=ON_ITS_WAY)
        else:
            self.checks.finite(tree, "x", what, remedy=ON_ITS_WAY)
        return tree, lease
