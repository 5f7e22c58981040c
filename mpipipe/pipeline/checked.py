"""Stages, losses and messages in check mode: as others, with a look at what goes in and comes out (see check.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpipipe.arrays import Array, Tree
from mpipipe.comm.mailbox import Envelope, Lease, Mailbox
from mpipipe.errors import NonFiniteError
from mpipipe.nn import Position
from mpipipe.nn.flat_view import flat_if_any
from mpipipe.pipeline.check import Checks, Sources, first_source
from mpipipe.pipeline.inspection import Watched, watched
from mpipipe.pipeline.loss import Loss
from mpipipe.pipeline.messages import StageMessages
from mpipipe.pipeline.signatures import takes_parameter
from mpipipe.pipeline.stage import StageAdapter

ON_ITS_WAY = (
    "it was finite when it was sent: it was written to after that, or changed on its way. MPIPIPE_SYNC_SENDS=1, and "
    "with GPUs MPIPIPE_GPU_DIRECT=0, may tell which"
)


def attach(checks: Checks, stage: StageAdapter) -> None:
    """Look at what goes into and comes out of a stage from now on."""
    stage.computes = checked = CheckedStage(stage, checks)
    checks.gradients_of[checked.number] = checked.named_gradients


class Kept(NamedTuple):
    """What a stage saved, and what must be as it was when it is used.

    Attributes
    ----------
    saved : of the stage
    microbatch : its number
    arrays : name -> x, dy, saved
    """

    saved: Any
    microbatch: int
    arrays: dict[str, Watched]


class CheckedStage:
    """Forward and backward of a stage, with a look at what goes in and comes out.

    Parameters
    ----------
    stage : the stage as the pipeline sees it
    checks : of this rank
    """

    def __init__(self, stage: StageAdapter, checks: Checks) -> None:
        assert stage.number is not None  # it is attached
        self.adapter, self.stage, self.checks, self.number = stage, stage.given, checks, stage.number

    def forward(self, x: Tree, position: Position | None = None) -> Any:
        """As the stage's own; what it saved comes back within a Kept."""
        checks, forward = self.checks, self.stage.forward
        microbatch = (self.stage.position if position is None else position).microbatch
        key = self.number, microbatch
        again, handed = key in checks.handed, checks.handed.get(key)
        if handed is None and self.number == 0:
            handed = checks.batch["inputs", microbatch]
        if handed is None:
            handed = watched(*key, x, "x")
        elif again:
            checks.unchanged(handed, "x was written to between a forward and its recomputation")
        else:
            checks.unchanged(handed, "the inputs of a call were written to before their forward")
        takes = position is not None and takes_parameter(forward, "position")
        result = forward(x, position=position) if takes else forward(x)
        checks.unchanged(handed, "forward wrote to x, which the stage was handed")
        if type(result) is not tuple or len(result) != 2:
            return result  # the executor says so
        y, saved = result
        checks.finite(y, "y", "forward returned an output that is not finite", self._sources(x))
        checks.after((self.number, "forward"), microbatch)
        if not again:
            checks.returns(watched(*key, y, "y", without=x), (self.number, "forward"))
        if not checks.training:
            return y, saved
        checks.handed[key] = handed
        return y, Kept(saved, microbatch, {"x": handed, "saved": self._watched(microbatch, saved, "saved")})

    def backward(self, dy: Tree, kept: Kept) -> Tree:
        """As the stage's own."""
        arrays = self._before(dy, kept)
        dx = self.stage.backward(dy, kept.saved)
        self._after_backward("backward", arrays, kept)
        self._look_at_gradients("backward")
        self._return_gradient("backward", dx, dy, kept)
        return dx

    def backward_input(self, dy: Tree, kept: Kept) -> tuple[Tree, Kept]:
        """As the stage's own."""
        arrays = self._before(dy, kept)
        dx, pending = self.stage.backward_input(dy, kept.saved)
        self._after_backward("input gradient", arrays, kept)
        self._return_gradient("input gradient", dx, dy, kept)
        arrays["pending"] = self._watched(kept.microbatch, pending, "pending")
        return dx, Kept(pending, kept.microbatch, arrays)

    def backward_weight(self, kept: Kept) -> None:
        """As the stage's own."""
        for name, arrays in kept.arrays.items():
            self.checks.unchanged(arrays, f"{name} was written to between input gradient and weight gradient")
        self.stage.backward_weight(kept.saved)
        del kept.arrays["pending"]  # they are the stage's own
        self._after_backward("weight gradient", kept.arrays, kept)
        self._look_at_gradients("weight gradient")

    def named_gradients(self) -> dict[str, Array]:
        """The gradients by their names, without those that hold nothing yet in this step."""
        found: dict[str, Array] = {} if self.adapter.is_model else _named(getattr(self.stage, "gradients", None))
        for model in self.adapter.models:
            found |= {name: array for name, array in model.gradients.items() if name not in model.unwritten}
            found |= {f"{name}, part": array for name, array in model.parts.items() if name not in model.unwritten}
        return found

    def _before(self, dy: Tree, kept: Kept) -> dict[str, Watched]:
        """Look at what the backward of a micro-batch is given; return what it must leave as it is."""
        checks, microbatch = self.checks, kept.microbatch
        for name, arrays in kept.arrays.items():
            checks.unchanged(arrays, f"{name} was written to between forward and backward")
        checks.take_back(self.number, microbatch)
        del checks.handed[self.number, microbatch]
        return {"x": kept.arrays["x"], "dy": watched(self.number, microbatch, dy, "dy")}

    def _after_backward(self, name: str, handed: dict[str, Watched], kept: Kept) -> None:
        for array, arrays in handed.items():
            self.checks.unchanged(arrays, f"{name} wrote to {array}, which the stage was handed")
        self.checks.after((self.number, name), kept.microbatch)

    def _return_gradient(self, name: str, dx: Tree, dy: Tree, kept: Kept) -> None:
        checks, x = self.checks, [array for _, array in kept.arrays["x"].leaves]
        if checks.gradients:
            checks.finite(dx, "dx", f"{name} returned an input gradient that is not finite", self._sources())
        checks.returns(watched(self.number, kept.microbatch, dx, "dx", without=[dy, x]), (self.number, name))

    def _look_at_gradients(self, name: str) -> None:
        if self.checks.gradients:
            what = f"{name} left the gradient of a parameter that is not finite"
            self.checks.finite(self.named_gradients(), "gradient", what, self._sources())

    def _watched(self, microbatch: int, value: Any, name: str) -> Watched:
        """What a stage keeps for its backward, without the gradients, to which other micro-batches add meanwhile."""
        return watched(self.number, microbatch, value, name, without=self.adapter.gradients)

    def _sources(self, x: Tree = ()) -> Sources:
        """What a result was computed from: of a stage, all but the first have had their x looked at."""
        parameters = [_named(getattr(each, "parameters", None)) for each in (self.stage, *self.adapter.models)]
        return [("the input of this call", x), *(("parameter", each) for each in parameters)]


def _named(holder: Any) -> dict[str, Array]:
    """The arrays of a user's gradients or parameters by their names; by `flat` where they have none."""
    if isinstance(holder, Mapping) and holder:
        return dict(holder)
    flat = flat_if_any(holder)
    return {} if flat is None else {"flat": flat}


class CheckedLoss(Loss):
    """A user's loss, with a look at what goes in and comes out."""

    def __init__(self, function: Callable[..., Any], checks: Checks) -> None:
        super().__init__(function)
        self._checks = checks
        self._sources: Sources = ()

    def call(self, output: Tree, target: Tree, factor: float) -> Any:
        """Return what the function returns."""
        checks = self._checks
        names = ("y", "the output of the last stage"), ("targets", "its targets")
        handed = [watched(None, None, tree, name) for tree, (name, _) in zip((output, target), names)]
        self._sources = [("the targets of this call", target)]
        result = super().call(output, target, factor)
        for arrays, (_, what) in zip(handed, names):
            checks.unchanged(arrays, f"the loss wrote to {what}")
        if self.with_head is not None and checks.gradients:
            what = "the loss left a gradient of the head that is not finite"
            checks.finite(checks.gradients_of[checks.last_stage](), "gradient", what, self._sources)
        return result

    def checked(self, result: Any) -> Any:
        """As that of any loss."""
        try:
            return super().checked(result)
        except NonFiniteError as error:
            error.found = f"{error.found}{first_source(self._sources)}; y is finite"
            raise

    def scaled(self, *arguments: Any) -> Tree:
        """As that of any loss."""
        gradient = super().scaled(*arguments)
        if self._checks.gradients:
            what = "the loss returned a gradient of the output that is not finite"
            self._checks.finite(gradient, "doutput", what, self._sources)
        return gradient


class CheckedMessages(StageMessages):
    """Activations and gradients of one rank, with a look at those that arrive.

    Parameters
    ----------
    mailbox, warmup_calls : as of StageMessages
    checks : of this rank
    """

    def __init__(self, mailbox: Mailbox, warmup_calls: int, checks: Checks) -> None:
        super().__init__(mailbox, warmup_calls)
        self._checks = checks

    def receive_activation(self, envelope: Envelope) -> tuple[Tree, Lease]:
        """Return (activation, lease)."""
        tree, lease = super().receive_activation(envelope)
        self._checks.finite(tree, "x", _arrived(envelope), remedy=ON_ITS_WAY)
        return tree, lease

    def receive_gradient(self, envelope: Envelope) -> tuple[Tree, Lease]:
        """Return (gradient, lease)."""
        tree, lease = super().receive_gradient(envelope)
        if self._checks.gradients:
            self._checks.finite(tree, "dy", _arrived(envelope), remedy=ON_ITS_WAY)
        return tree, lease


def _arrived(envelope: Envelope) -> str:
    return f"{envelope.subject} is not finite as it arrived from rank {envelope.peer}"
