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
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Tree
from mpipipe.comm import Envelope, Lease, Mailbox
from mpipipe.errors import NonFiniteError, StageError
from mpipipe.nn import Position, Saved
from mpipipe.pipeline.attached import AttachedStage
from mpipipe.pipeline.batch import Call, LossFunction
from mpipipe.pipeline.loss import Loss, Weigh
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


class Checks:
    """Knows the arrays of the call under way on this rank."""

    def __init__(self, rank: int, last_stage: int) -> None:
        self.rank = rank
        self.last_stage = last_stage
        # By stage, a function that gives its gradients by name.
        self.gradients_of: dict[int, Callable[[], dict[str, Array]]] = {}
        self._clear()

    def _clear(self, training: bool = False, gradients: bool = False) -> None:
        # True if backwards follow, and if their gradients are looked at.
        self.training = training
        self.gradients = gradients
        # The inputs of stages, by stage and micro-batch, and the user's arrays.
        self.handed: dict[tuple[int, int], Watched] = {}
        self.batch: dict[tuple[str, int], Watched] = {}
        # Results that a stage returned last: a buffer that is used again shows in them.
        self.recent: deque[Watched] = deque(maxlen=RECENT)
        # Results that are held until their backward, or for the user, by stage and micro-batch.
        self.outputs: dict[tuple[int, int], Watched] = {}
        self.input_gradients: dict[int, Watched] = {}

    def begin(self, call: Call) -> None:
        """Begin a call: take the checksums of its batch."""
        self._clear(call.training, call.scale == 1)
        for name, stage, trees in (
            ("inputs", 0, call.inputs),
            ("targets", self.last_stage, call.targets),
        ):
            if not isinstance(trees, list):
                continue
            for position, tree in zip(call.positions, trees):
                self.batch[name, position.microbatch] = watched(
                    stage, position.microbatch, tree, name
                )

    def end(self) -> None:
        """End a call whose actions have ended and whose messages have left."""
        self._look_at_recent("the end of the call")
        for copies in (*self.outputs.values(), *self.input_gradients.values()):
            self.unchanged(copies, f"{copies.name} was written to after its stage had returned it")
        for (name, _), copies in self.batch.items():
            self.unchanged(copies, f"the {name} of a call were written to before its end")
        self._clear(gradients=self.gradients)

    def look_at_sums(self) -> None:
        """Look at the gradients of a step, after the sums over replicas and tied parameters."""
        if self.gradients:
            what = (
                "the sum of a gradient over replicas, or places of a tied parameter, is not finite"
            )
            for stage, gradients in self.gradients_of.items():
                self.finite(gradients(), "gradient", what, stage=stage)

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
            place = dict(rank=self.rank, stage=arrays.stage, microbatch=arrays.microbatch)
            raise StageError(
                what,
                **place,
                found=description,
                expected="the content that it had",
                remedy=OWN_ARRAYS,
            )

    def after(self, action: str, stage: int, microbatch: int) -> None:
        """Look at results of earlier actions, which this one may have written to."""
        self._look_at_recent(f"{action} of stage {stage}, micro-batch {microbatch}")

    def _look_at_recent(self, when: str) -> None:
        for copies in self.recent:
            what = "was written to after its stage had returned it, at the latest by"
            self.unchanged(copies, f"{copies.name} {what} {when}")

    def take_back(self, stage: int, microbatch: int) -> None:
        """Look at an output before its backward: from now on the stage may write to it."""
        y = self.outputs.pop((stage, microbatch), None)
        if y is None:
            return
        self.unchanged(y, "y was written to after its stage had returned it")
        if y in self.recent:
            self.recent.remove(y)


# -- Stages, losses and messages in check mode -----------------------------------------------------


class Kept(NamedTuple):
    """What a stage saved, and what must be as it was when it is used."""

    saved: Saved
    microbatch: int  # its number
    arrays: dict[str, Watched]  # name -> x, dy, saved


class CheckedStage:
    """Forward and backward of a stage, with a look at what goes in and comes out."""

    def __init__(self, stage: AttachedStage, checks: Checks) -> None:
        self.attached = stage
        self.stage = stage.stage
        self.position = self.stage.position
        self.checks = checks
        self.number = stage.number
        checks.gradients_of[self.number] = self.named_gradients

    def forward(self, x: Tree) -> Any:
        """As the stage's own; what it saved comes back within a Kept."""
        checks = self.checks
        self.stage.position = self.position
        microbatch = self.position.microbatch
        key = self.number, microbatch
        again = key in checks.handed
        handed = checks.handed.get(key)
        if handed is None and self.number == 0:  # not there where a function has given it just now
            handed = checks.batch.get(("inputs", microbatch))
        if handed is None:
            handed = watched(*key, x, "x")
        elif again:
            checks.unchanged(handed, "x was written to between a forward and its recomputation")
        else:
            checks.unchanged(handed, "the inputs of a call were written to before their forward")
        result = self.stage.forward(x)
        checks.unchanged(handed, "forward wrote to x, which the stage was handed")
        if type(result) is not tuple or len(result) != 2:
            return result  # the executor says so
        y, saved = result
        checks.finite(y, "y", "forward returned an output that is not finite", self._sources(x))
        checks.after("forward", *key)
        if not again:
            output = watched(*key, y, "y", without=x)
            checks.recent.append(output)
            # Until its backward where one follows.
            if checks.training or self.number == checks.last_stage:
                checks.outputs[key] = output
        if not checks.training:
            return y, saved
        checks.handed[key] = handed
        return y, Kept(
            saved, microbatch, {"x": handed, "saved": self._watched(microbatch, saved, "saved")}
        )

    def backward(self, dy: Tree, kept: Kept) -> Tree:
        arrays = self._before(dy, kept)
        dx = self.stage.backward(dy, kept.saved)
        self._after("backward", arrays, kept)
        self._return_gradient("backward", dx, dy, kept)
        return dx

    def backward_input(self, dy: Tree, kept: Kept) -> tuple[Tree, Kept]:
        arrays = self._before(dy, kept)
        dx, pending = self.stage.backward_input(dy, kept.saved)
        self._after("input gradient", arrays, kept)
        self._return_gradient("input gradient", dx, dy, kept)
        arrays["pending"] = self._watched(kept.microbatch, pending, "pending")
        return dx, Kept(pending, kept.microbatch, arrays)

    def backward_weight(self, kept: Kept) -> None:
        for name, copies in kept.arrays.items():
            self.checks.unchanged(
                copies, f"{name} was written to between input gradient and weight gradient"
            )
        self.stage.backward_weight(kept.saved)
        del kept.arrays["pending"]  # they are the stage's own
        self._after("weight gradient", kept.arrays, kept)

    def named_gradients(self) -> dict[str, Array]:
        """Return all gradients by name, and the parts of tied ones."""
        named = named_arrays(self.stage, "gradients")
        for inner in self.stage.inner_stages:
            for name, array in inner.parts.items():
                named[f"{name}, part"] = array
        return named

    def _before(self, dy: Tree, kept: Kept) -> dict[str, Watched]:
        """Look at what a backward is given; return the arrays that it must leave as they are."""
        checks = self.checks
        microbatch = kept.microbatch
        for name, copies in kept.arrays.items():
            checks.unchanged(copies, f"{name} was written to between forward and backward")
        checks.take_back(self.number, microbatch)
        del checks.handed[self.number, microbatch]
        return {"x": kept.arrays["x"], "dy": watched(self.number, microbatch, dy, "dy")}

    def _after(self, name: str, handed: dict[str, Watched], kept: Kept) -> None:
        for array, copies in handed.items():
            self.checks.unchanged(copies, f"{name} wrote to {array}, which the stage was handed")
        self.checks.after(name, self.number, kept.microbatch)
        if self.checks.gradients and name != "input gradient":
            what = f"{name} left the gradient of a parameter that is not finite"
            self.checks.finite(self.named_gradients(), "gradient", what, self._sources())

    def _return_gradient(self, name: str, dx: Tree, dy: Tree, kept: Kept) -> None:
        checks = self.checks
        others = [dy, dict(kept.arrays["x"].leaves)]
        if checks.gradients:
            checks.finite(
                dx, "dx", f"{name} returned an input gradient that is not finite", self._sources()
            )
        result = watched(self.number, kept.microbatch, dx, "dx", without=others)
        checks.recent.append(result)
        # To the end of the call where the user gets it.
        if self.number == 0:
            checks.input_gradients[kept.microbatch] = result

    def _watched(self, microbatch: int, value: object, name: str) -> Watched:
        """Watch what a stage keeps for its backward, without gradients: others add to them."""
        return watched(self.number, microbatch, value, name, without=self.attached.gradient_arrays)

    def _sources(self, x: Tree = ()) -> Sources:
        """Return what a result was computed from; inputs of later stages were looked at before."""
        parameters = named_arrays(self.stage, "parameters")
        return [("the input of this call", x), ("parameter", parameters)]


class CheckedLoss(Loss):
    """A user's loss, with a look at what goes in and comes out."""

    def __init__(self, function: LossFunction, checks: Checks) -> None:
        super().__init__(function)
        self._checks = checks
        self._sources: Sources = ()

    def call(
        self,
        output: Tree,
        target: Tree,
        factor: float,
        position: Position | None = None,
        weigh: Weigh | None = None,
    ) -> Any:
        checks = self._checks
        y = watched(None, None, output, "y")
        targets = watched(None, None, target, "targets")
        self._sources = [("the targets of this call", target)]
        result = super().call(output, target, factor, position, weigh)
        checks.unchanged(y, "the loss wrote to the output of the last stage")
        checks.unchanged(targets, "the loss wrote to its targets")
        if self.with_head is not None and checks.gradients:
            what = "the loss left a gradient of the head that is not finite"
            checks.finite(checks.gradients_of[checks.last_stage](), "gradient", what, self._sources)
        return result

    def checked(self, result: object) -> Any:
        try:
            return super().checked(result)
        except NonFiniteError as error:
            error.found = f"{error.found}{first_source(self._sources)}; y is finite"
            raise

    def scaled(self, *arguments: Any) -> Tree:  # type: ignore[override]  # it knows the checks
        gradient = Loss.scaled(*arguments)
        if self._checks.gradients:
            what = "the loss returned a gradient of the output that is not finite"
            self._checks.finite(gradient, "doutput", what, self._sources)
        return gradient


class CheckedMessages(StageMessages):
    """Activations and gradients of one rank, with a look at those that arrive."""

    def __init__(self, mailbox: Mailbox, checks: Checks) -> None:
        super().__init__(mailbox)
        self._checks = checks

    def receive_activation(self, envelope: Envelope) -> tuple[Tree, Lease]:
        tree, lease = super().receive_activation(envelope)
        self._look_at(tree, "x", envelope)
        return tree, lease

    def receive_gradient(self, envelope: Envelope) -> tuple[Tree, Lease]:
        tree, lease = super().receive_gradient(envelope)
        if self._checks.gradients:
            self._look_at(tree, "dy", envelope)
        return tree, lease

    def _look_at(self, tree: Tree, name: str, envelope: Envelope) -> None:
        what = f"{envelope.subject} is not finite as it arrived from rank {envelope.peer}"
        self._checks.finite(tree, name, what, remedy=ON_ITS_WAY)
