"""The checkpoints of a training while it runs: written behind it, and what happens where that fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpipipe import checkpoint
from mpipipe.comm.preemption import Preemption
from mpipipe.errors import StorageError
from mpipipe.train.config import TrainConfig
from mpipipe.train.outlet import tell
from mpipipe.train.progress import Progress
from mpipipe.train.report import NullReporter, Reporter


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
        stages = progress.pipeline.stages
        self.saver = checkpoint.Saver(root, progress.mesh, stages, progress.optimizer, keep=config.keep)

    def follow(self, facts: Mapping[str, Any], leaves: bool) -> None:
        """After a step: look how far the checkpoint in flight is, and begin another one where it is time for one.

        Parameters
        ----------
        facts : what to save besides the progress, such as the configuration
        leaves : whether the job leaves now: with a whole checkpoint of this step
        """
        with self._bearing():
            if self.saver.poll() is not None:
                self.preemption.save_took(self.saver.seconds)
        config, step = self.config, self.progress.step
        if leaves or (config.save_every and (step % config.save_every == 0 or step == config.steps)):
            self.save(facts)
        if leaves:
            self.finish()

    def save(self, facts: Mapping[str, Any]) -> None:
        """Begin to save a checkpoint; one that is still in flight is finished first."""
        self.finish()
        with self._bearing():
            self.saver.save(self.progress.step, self.progress.state(facts), beforehand=self.reporter.sync)

    def finish(self) -> None:
        """Wait until nothing is in flight."""
        with self._bearing():
            self.saver.finish()

    @contextmanager
    def _bearing(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            if self.config.on_storage_error == "end":
                raise
            if self.progress.mesh.rank == 0:
                step = self.progress.step
                tell(f"mpipipe: step {step}: {error.message}; the training goes on, and tries again at the next save")

    def __enter__(self) -> Checkpoints:
        self.saver.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._bearing():
            self.saver.__exit__(*error)
