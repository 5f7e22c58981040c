"""The checkpoints of a training while it runs: written behind it, and what happens where that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mpipipe import checkpoint
from mpipipe.comm.preemption import Preemption
from mpipipe.errors import StorageError
from mpipipe.train.config import TrainConfig
from mpipipe.train.outlet import tell
from mpipipe.train.progress import Progress
from mpipipe.train.report import NullReporter, Reporter

AGAIN = "the training goes on, and tries again at the next save"


class Checkpoints:
    """Saves the progress of a training; a context manager, whose end finishes what is in flight.

    Every method is collective. Where a checkpoint cannot be written, all ranks raise StorageError, or go on and rank 0
    says so in one line, as `config.on_storage_error` has it. The next save tries again.

    Parameters
    ----------
    config : the same on every rank
    root : folder of the checkpoints
    progress : what is saved
    reporter : whose metrics must not end before a checkpoint does
    preemption : is told how long a save takes

    Attributes
    ----------
    owed : whether a save was begun that is not known to be whole, or to have failed. Where ranks have died meanwhile,
        `follow` begins another one
    """

    def __init__(
        self,
        config: TrainConfig,
        root: Path,
        progress: Progress,
        reporter: Reporter | NullReporter,
        preemption: Preemption,
    ) -> None:
        self.config, self.progress, self.reporter, self.preemption = config, progress, reporter, preemption
        stages, self.owed = progress.pipeline.stages, False
        self.saver = checkpoint.Saver(root, progress.mesh, stages, progress.optimizer, keep=config.keep)

    def follow(self, facts: Mapping[str, Any], leaves: bool) -> None:
        """After a step: look how far the checkpoint in flight is, and begin another one where it is time for one.

        Parameters
        ----------
        facts : what to save besides the progress, such as the configuration
        leaves : whether the job leaves now: with a whole checkpoint of this step
        """
        self._look(self.saver.poll, AGAIN)
        config, step = self.config, self.progress.step
        lost = self.owed and not self.saver.in_flight
        then = "the job leaves without it" if leaves else AGAIN
        if leaves or lost or (config.save_every and (step % config.save_every == 0 or step == config.steps)):
            self._save(facts, then)
        if leaves:
            self.finish(then)

    def _save(self, facts: Mapping[str, Any], then: str) -> None:
        """Begin to save a checkpoint once there is room for it, also where an earlier one turns out to have failed."""
        self._look(partial(self.saver.finish, room_for=self.progress.step), AGAIN)
        self.owed = True
        with self._bearing(then):
            self.saver.save(self.progress.step, self.progress.state(facts), beforehand=self.reporter.sync)

    def finish(self, then: str = AGAIN) -> None:
        """Wait until nothing is in flight; `then` is what the training does without a checkpoint that failed."""
        self._look(self.saver.finish, then)

    def _look(self, how: Callable[[], Path | None], then: str) -> None:
        with self._bearing(then):
            if how() is not None:
                self.owed = self.saver.in_flight
                self.preemption.save_took(self.saver.seconds)

    @contextmanager
    def _bearing(self, then: str) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self.owed = self.saver.in_flight
            if self.config.on_storage_error == "end":
                raise
            if self.progress.mesh.rank == 0:
                tell(f"mpipipe: step {self.progress.step}: {error.message}; {then}")

    def __enter__(self) -> Checkpoints:
        self.saver.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._bearing("the training ends without it"):
            self.saver.__exit__(*error)
