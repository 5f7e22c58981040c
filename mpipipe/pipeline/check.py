"""Check mode (`Pipeline(check=True)`): finds the first array that is not finite or is written to, where that happens.

    forward   x -> y        x as it was; y finite                             y watched from here ...
    message   y -> x        x finite, as the sender found y
    loss      y -> dy       y and targets as they were; dy finite
    backward  dy -> dx      x, dy and saved as they were; gradients and dx finite     ... to here

Stages, losses and messages stand behind those of checked.py then, which look at what goes in and comes out. Other
pipelines have nothing of it. Checksums tell whether an array was written to. Each array is looked at a few times:
results after the next actions of the rank, where a buffer that is used again shows, and until their messages have
left; what was saved, when its backward begins; the batch at the end of the call.

With a `scale` other than 1 gradients may overflow: an optim.LossScaler looks for that. They are not looked at then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mpipipe.arrays import Array
from mpipipe.comm.mailbox import Mailbox
from mpipipe.errors import NonFiniteError, StageError
from mpipipe.pipeline.call_state import CallInputs
from mpipipe.pipeline.inspection import Watched, non_finite, watched

OWN_ARRAYS = "write into arrays of your own: x.copy(), dy.copy(), and a new y and dx for each micro-batch"


OVERFLOW = "look for a division by 0, a log or sqrt out of range, an overflow of exp or of a product, a step too large"
SOURCE = "look at what is named last in `found`: it was so before"
Sources: TypeAlias = "Sequence[tuple[str, Any]]"  # (what it is, arrays) of all that a result was computed from


def first_source(sources: Sources) -> str:
    """Return the end of a sentence that describes the first of these that is not finite; "" where all are."""
    for what, tree in sources:
        found = non_finite(tree, what)
        if found is not None:
            return f"; before that: {found}"
    return ""


class Result:
    """What a stage has returned, and who may read it.

    Attributes
    ----------
    arrays : of y or dx
    action : (stage, name of the action): the next of its kind would use a buffer again
    sent : messages of this call that have to leave before nobody reads it; None before its own was sent
    """

    def __init__(self, arrays: Watched, action: tuple[int, str]):
        self.arrays, self.action = arrays, action
        self.sent: int | None = None


class Checks:
    """What is known of the arrays of the call under way on this rank.

    Parameters
    ----------
    rank : of this process in the pipeline
    last_stage : number of the last stage
    mailbox : which knows what has been sent
    """

    def __init__(self, rank: int, last_stage: int, mailbox: Mailbox) -> None:
        self.rank, self.last_stage, self.mailbox = rank, last_stage, mailbox
        self.gradients_of: dict[int, Callable[[], dict[str, Array]]] = {}  # stage -> its gradients by their names
        self._clear()

    def _clear(self, training: bool = False, gradients: bool = False) -> None:
        self.training, self.gradients = training, gradients  # whether backwards follow; whether they are looked at
        self.handed: dict[tuple[int, int], Watched] = {}  # (stage, micro-batch) -> x
        self.batch: dict[tuple[str, int], Watched] = {}  # the user's arrays
        self.recent: list[Result] = []
        self.returned: dict[
            tuple[int, int | None, str], Watched
        ] = {}  # (stage, micro-batch, name) -> those after `recent`

    def begin(self, inputs: CallInputs) -> None:
        """Begin a call."""
        self._clear(inputs.training, inputs.scale == 1)
        for name, stage, trees in (("inputs", 0, inputs.inputs), ("targets", self.last_stage, inputs.targets)):
            for microbatch, tree in enumerate(trees or ()):
                self.batch[name, microbatch] = watched(stage, microbatch, tree, name)

    def end(self) -> None:
        """End a call whose actions have ended and whose messages have left."""
        self._look_at_recent("the end of the call")
        for (_, _, name), arrays in self.returned.items():
            self.unchanged(arrays, f"{name} was written to after its stage had returned it")
        for (name, _), arrays in self.batch.items():
            self.unchanged(arrays, f"the {name} of a call were written to before its end")
        self._clear(gradients=self.gradients)

    def look_at_sums(self) -> None:
        """Look at the gradients that a step hands out, after the sums over replicas and places of tied parameters."""
        if self.gradients:
            what = "the sum of a gradient over replicas, or places of a tied parameter, is not finite"
            for stage, gradients in self.gradients_of.items():
                self.finite(gradients(), "gradient", what, stage=stage)

    def finite(
        self, tree: Any, name: str, what: str, sources: Sources = (), remedy: str = OVERFLOW, **place: int | None
    ) -> None:
        """Raise NonFiniteError if an array is not finite; the first of its `sources` that is not is named, too."""
        found = non_finite(tree, name)
        if found is not None:
            source = first_source(sources)
            remedy = SOURCE if source else remedy
            raise NonFiniteError(
                what, rank=self.rank, found=f"{found}{source}", expected="finite numbers", remedy=remedy, **place
            )

    def unchanged(self, arrays: Watched, what: str) -> None:
        """Raise StageError if an array has been written to."""
        found = arrays.change()
        if found is not None:
            raise StageError(
                what,
                rank=self.rank,
                stage=arrays.stage,
                microbatch=arrays.microbatch,
                found=found,
                expected="the content that it had",
                remedy=OWN_ARRAYS,
            )

    def returns(self, arrays: Watched, action: tuple[int, str]) -> None:
        """Watch what a stage has returned."""
        self.recent.append(Result(arrays, action))

    def after(self, action: tuple[int, str], microbatch: int) -> None:
        """Look at what was returned by the actions before this one."""
        sent, left = len(self.mailbox.sent), len(self.mailbox.sent) - len(self.mailbox.outgoing)
        self._look_at_recent(f"{action[1]} of stage {action[0]}, micro-batch {microbatch}")
        recent, self.recent = self.recent, []
        for result in recent:
            result.sent = sent if result.sent is None else result.sent
            if result.action != action or left < result.sent:
                self.recent.append(result)
            else:
                self._keep(result)

    def _look_at_recent(self, when: str) -> None:
        for result in self.recent:
            name = "y" if result.action[1] == "forward" else "dx"
            self.unchanged(
                result.arrays, f"{name} was written to after its stage had returned it, at the latest by {when}"
            )

    def take_back(self, stage: int, microbatch: int) -> None:
        """Look at y for the last time, before the backward: from now on the stage may write to it."""
        for result in self.recent:
            if result.action == (stage, "forward") and result.arrays.microbatch == microbatch:
                self.returned[stage, microbatch, "y"] = result.arrays
                self.recent.remove(result)
                break
        found = self.returned.pop((stage, microbatch, "y"), None)
        if found is not None:
            self.unchanged(found, "y was written to after its stage had returned it")

    def _keep(self, result: Result) -> None:
        """Look at a result once more, when its backward comes or at the end, where the rank holds it until then."""
        stage, name, microbatch = *result.action, result.arrays.microbatch
        if name == "forward" and (self.training or stage == self.last_stage):
            self.returned[stage, microbatch, "y"] = result.arrays
        elif name != "forward" and stage == 0:
            self.returned[stage, microbatch, "dx"] = result.arrays
