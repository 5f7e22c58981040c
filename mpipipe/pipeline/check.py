"""Check mode (`Pipeline(check=True)`) finds the first array that is not finite or is written to.

    forward   x -> y        x and y finite
    loss      y -> dy       value and dy finite
    backward  dy -> dx      x, y and saved as the forward has left them, dy as it came; dy, dx and
                            gradients finite
    the sums  of a step     gradients finite
    the end   of a call     dx, outputs and the batch as they were

Stages and the loss are wrapped then, by what looks at all that goes in and comes out. Checksums
tell whether an array was written to.

With a `scale` other than 1 gradients may overflow: an optim.LossScaler looks for that. They are not
looked at then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Tree
from mpipipe.errors import NonFiniteError, StageError
from mpipipe.nn import Saved
from mpipipe.pipeline.attached import AttachedStage
from mpipipe.pipeline.batch import Call, LossFunction
from mpipipe.pipeline.loss import checked_weight
from mpipipe.stages import named_arrays
from mpipipe.text import counted

OWN_ARRAYS = (
    "write into arrays of your own: x.copy(), dy.copy(), and a new y and dx for each micro-batch"
)
OVERFLOW = (
    "look for a division by 0, a log or sqrt out of range, an overflow of exp or of a "
    "product, a step too large"
)
SOURCE = "look at what is named last in `found`: it was so before"
# What a stage saved, and its micro-batch.
Kept: TypeAlias = "tuple[Saved, int]"


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


class Watched(NamedTuple):
    """An array that must stay as it is, with its checksum."""

    name: str
    stage: int
    microbatch: int
    array: Array
    checksum: int


def watched(
    stage: int, microbatch: int, value: object, name: str, without: object = ()
) -> list[Watched]:
    """Take the checksums of arrays, without those that share memory with `without`."""
    others = [array for _, array in arrays.named_leaves(without, "")]
    leaves = []
    for leaf, array in arrays.named_leaves(value, name, grown=False):
        if not array.dtype.hasobject and not arrays.shares_any(array, others):
            leaves.append(Watched(leaf, stage, microbatch, array, _checksum(array)))
    return leaves


def _checksum(array: Array) -> int:
    return crc32(np.ascontiguousarray(arrays.on_host(array)).reshape(-1).view(np.uint8).data)


def _described(array: Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"


@dataclass(eq=False)
class Checks:
    """What is looked at in the call under way on this rank, and how."""

    rank: int
    last_stage: int
    call: Call | None = None  # under way, or the last one
    # Arrays that the user has, or gets, or that a message may read.
    to_end: list[Watched] = field(default_factory=list)

    @property
    def gradients(self) -> bool:
        """Whether gradients must be finite."""
        return self.call is not None and self.call.training and self.call.scale == 1

    def begin(self, call: Call) -> None:
        """Begin a call: take the checksums of its batch."""
        self.call = call
        self.to_end = []
        batch = ("input", 0, call.inputs), ("target", self.last_stage, call.targets)
        for name, stage, trees in batch:
            if isinstance(trees, list):
                for position, tree in zip(call.positions, trees):
                    self.to_end += watched(stage, position.microbatch, tree, name)

    def end(self) -> None:
        """End a call whose actions have ended and whose messages have left."""
        self.unchanged(self.to_end, "the end of the call")
        self.to_end = []

    def look_at_sums(self, stages: Sequence[AttachedStage]) -> None:
        """Look at the gradients of a step, after the sums over replicas and tied parameters."""
        what = "the sum of a gradient over replicas, or places of a tied parameter, is not finite"
        if self.gradients:
            for stage in stages:
                gradients = named_arrays(stage.stage, "gradients")
                self.finite(gradients, "gradient", what, stage=stage.number)

    def finite(
        self,
        tree: object,
        name: str,
        what: str,
        *sources: tuple[str, object],
        stage: int | None = None,
    ) -> None:
        """Raise NonFiniteError if an array is not finite; name the sources that are not."""
        description = non_finite(tree, name)
        if description is None:
            return
        remedy = OVERFLOW
        for source, arrays_of_source in sources:
            before = non_finite(arrays_of_source, source)
            if before is not None:
                description += f"; before that: {before}"
                remedy = SOURCE
        raise NonFiniteError(
            what,
            rank=self.rank,
            stage=stage,
            found=description,
            expected="finite numbers",
            remedy=remedy,
        )

    def unchanged(self, watch: Sequence[Watched], until: str) -> None:
        """Raise StageError for an array that has been written to."""
        for name, stage, microbatch, array, before in watch:
            if _checksum(array) != before:
                raise StageError(
                    f"{name} was written to before {until}",
                    rank=self.rank,
                    stage=stage,
                    microbatch=microbatch,
                    found=f"{name}, {_described(array)}, with another checksum than before",
                    expected="the content that it had",
                    remedy=OWN_ARRAYS,
                )


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
        # By micro-batch, what must be as it was when its next action begins.
        self.kept: dict[int, list[Watched]] = {}

    def forward(self, x: Tree) -> Any:
        position = self.position
        microbatch = position.microbatch
        if self.number:
            self._finite(x, "x", "the input is not finite, and it was when it was sent")
        if position.recompute == "now":
            self.checks.unchanged(self.kept.pop(microbatch), "its forward ran again")
        handed = watched(self.number, microbatch, x, "x")
        self.stage.position = position
        result = self.stage.forward(x)
        if type(result) is not tuple or len(result) != 2:
            return result  # the executor says so
        y, saved = result
        what = "forward returned an output that is not finite"
        self._finite(y, "y", what, ("the input of this call", x))
        if not position.keeps:
            self.checks.unchanged(handed, "the end of its forward")
            # A message may still read it, or the user gets it, and no backward looks at it.
            self.checks.to_end += watched(self.number, microbatch, y, "y", x)
            return y, saved
        self.kept[microbatch] = handed + watched(self.number, microbatch, y, "y")
        if position.recompute != "later":
            self._keep(microbatch, saved, "saved")
        return y, (saved, microbatch)

    def backward(self, dy: Tree, kept: Kept) -> Tree:
        dx = self._backward("backward", self.stage.backward, dy, kept)
        self._look_at_gradients("backward")
        return dx

    def backward_input(self, dy: Tree, kept: Kept) -> tuple[Tree, Kept]:
        dx, pending = self._backward("input gradient", self.stage.backward_input, dy, kept)
        microbatch = kept[1]
        self.kept[microbatch] = []
        self._keep(microbatch, pending, "pending")
        return dx, (pending, microbatch)

    def backward_weight(self, kept: Kept) -> None:
        pending, microbatch = kept
        self.checks.unchanged(self.kept.pop(microbatch), "its weight gradient")
        self.stage.backward_weight(pending)
        self._look_at_gradients("weight gradient")

    def _look_at_gradients(self, action: str) -> None:
        if self.checks.gradients:
            what = f"{action} left the gradient of a parameter that is not finite"
            self._finite(named_arrays(self.stage, "gradients"), "gradient", what)

    def _backward(self, action: str, work: Callable[..., Any], dy: Tree, kept: Kept) -> Any:
        checks = self.checks
        saved, microbatch = kept
        before = self.kept.pop(microbatch)
        checks.unchanged(before, "its backward")
        if checks.gradients:
            what = "the gradient is not finite, and it was when it was sent"
            if self.number == checks.last_stage:  # a share may be too large for its dtype
                what = "the gradient of the loss, times the share of its micro-batch, is not finite"
            self._finite(dy, "dy", what)
        handed = watched(self.number, microbatch, dy, "dy")
        result = work(dy, saved)
        checks.unchanged(handed, f"the end of its {action}")
        dx = result
        if action != "backward":
            dx = result[0]
        if checks.gradients:
            self._finite(dx, "dx", f"{action} returned an input gradient that is not finite")
        others = dy, [one.array for one in before]
        checks.to_end += watched(self.number, microbatch, dx, "dx", others)
        return result

    def _keep(self, microbatch: int, value: object, name: str) -> None:
        # Others add to gradients meanwhile.
        others = self.attached.gradient_arrays
        self.kept[microbatch] += watched(self.number, microbatch, value, name, others)

    def _finite(self, tree: object, name: str, what: str, *sources: tuple[str, object]) -> None:
        parameters = "parameter", named_arrays(self.stage, "parameters")
        self.checks.finite(tree, name, what, *sources, parameters, stage=self.number)


def checked_loss(
    function: LossFunction, checks: Checks, output: Tree, target: Tree, **options: Any
) -> Any:
    """Return what a user's loss returns, with a look at what comes out."""
    result = function(output, target, **options)
    # With weight 0 nobody looks at the others.
    is_right = type(result) is tuple and len(result) in (2, 3)
    if is_right and all(map(checked_weight, result[2:])):
        source = "the targets of this call", target
        value = result[0]
        if not arrays.is_device(value):
            value = np.asarray(value)
        checks.finite(value, "value", "the loss is not finite", source)
        if checks.gradients:
            what = "the loss returned a gradient of the output that is not finite"
            checks.finite(result[1], "doutput", what, source)
    return result
