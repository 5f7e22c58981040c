"""A stage while a pipeline runs it: what is done around calls and steps."""

from __future__ import annotations

from collections.abc import Callable

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.pipeline.construction import names_given
from mpipipe.schedules import Schedule
from mpipipe.stages import PipelineStage, Runner, gradient_arrays


class AttachedStage:
    """A stage of this rank, with its number and what has its forward and backward.

    `schedule` is that of training steps. `poll` is called between layers.
    """

    def __init__(
        self,
        stage: PipelineStage,
        number: int,
        schedule: Schedule,
        input_grads: bool,
        poll: Callable[[], object],
    ):
        self.stage = stage
        self.number = number
        # The stage itself, its CUDA graphs, or in check mode a CheckedStage.
        self.runner: Runner = stage
        # What the shortest actions call in place of the stage.
        self.direct = stage.direct
        # The gradient of the input is not asked for.
        self._ends = number == schedule.trained_from and (number > 0 or not input_grads)
        # Forwards are run again before their backwards.
        self._runs_again = any(stage == number for stage, _ in schedule.recomputed)
        self._poll = poll
        stage.attach(number, poll, names_given(schedule, number))
        # The gradients of a user's stage, which are kept so that no later array has their address,
        # and which tied parameters lie elsewhere.
        self._own_gradients = stage.own_gradients
        self._owners = [dict(inner.owners) for inner in stage.inner_stages]

    @property
    def gradient_arrays(self) -> list[Array]:
        """All gradients that a step adds to, in arrays that share no memory."""
        return gradient_arrays(self.stage)

    def detach(self) -> None:
        """Let go of what belongs to the pipeline, which is being closed."""
        self.runner = self.stage
        self.stage.detach(self._poll)

    def begin_call(self) -> None:
        """Compute with the parameters as they are now."""
        self.direct = self.stage.direct
        self.stage.begin_call(self._ends, self._runs_again)

    def begin_gradients(self) -> None:
        """Set all gradients to zero."""
        for inner in self.stage.inner_stages:
            inner.use_parts(True)
        for flat in self.gradient_arrays:
            arrays.set_zero(flat)

    def leave_step(self) -> None:
        """Let backwards outside of a step add to the gradients that the stage shows."""
        for inner in self.stage.inner_stages:
            inner.use_parts(False)

    def check_storage(self) -> None:
        """Raise ArgumentError if arrays are others than at construction.

        What a backward adds to the old gradients would be neither zeroed nor summed over the
        replicas.
        """
        self.check_gradients()
        for inner, before in zip(self.stage.inner_stages, self._owners):
            owners = inner.owners
            if owners != before:
                names = sorted(owners.keys() - before.keys()) or sorted(owners)
                raise ArgumentError(
                    "a later pipeline lets tied parameters share their storage, and sums up their "
                    "gradients",
                    stage=self.number,
                    found=", ".join(names),
                    expected="the storage that they had when this pipeline was built",
                    remedy="build this pipeline anew, or the later one of other stages",
                )

    def check_gradients(self) -> None:
        """Raise ArgumentError if the gradients of a user's stage were replaced."""
        place = _place_of(self.stage.own_gradients)
        before = _place_of(self._own_gradients)
        if place != before:
            raise ArgumentError(
                "the gradients of a stage have been replaced since the pipeline was built",
                stage=self.number,
                found=place,
                expected=f"{before}, the same in all steps",
                remedy="write into the array (gradients.flat[...] = 0), set nothing to None; or "
                "build it anew",
            )


def _place_of(gradients: Array | None) -> str:
    """Say where gradients lie, for errors and comparison."""
    if gradients is None:
        return "None"
    return f"{gradients.dtype.name}[{gradients.size}] at {arrays.address(gradients):#x}"
