"""`train --trace DIR`: a few early steps are recorded, and written once they are made.

Recorded are the second step since the training was started and the 15 after it, as far as there are any; a start
with one step to make records that one. The first step is unlike the others: memory is allocated and shapes are agreed
on. Validation and checkpoints belong to no step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from mpipipe.analysis import Recording, check_new, library
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job import Communicator, group_of
from mpipipe.pipeline import Pipeline
from mpipipe.text import counted
from mpipipe.train import output_folder

RECORDED = 16  # steps


def trace_folder(comm: Communicator, trace: str | None, out: Path, resumes: bool = False) -> Path | None:
    """Return where a trace will be written; collective. Raises the same error on every rank where it cannot be.

    A training that `resumes` was perhaps traced before it was ended: nothing is recorded then where the folder exists.
    """
    if trace is None:
        return None
    folder = Path(output_folder.shared_path(comm, trace))
    with group_of(comm).raise_together("train: the folder of the trace"):
        if comm.rank == 0:
            if folder == out or folder in out.parents or out in folder.parents:
                raise ConfigError(
                    "one of out and trace is inside the other",
                    found=f"out {out}, trace {folder}",
                    expected="a folder of its own for the trace",
                )
            if not (resumes and folder.exists()):
                check_new(folder)
            library()
    is_there = group_of(comm).gather("train: whether there is a trace", comm.rank == 0 and folder.exists())[0]
    return None if is_there else folder


class Tracing:
    """Records some steps of a training, if there is a folder to write them to, and shows where their time went."""

    def __init__(self, folder: Path | None, pipeline: Pipeline, mesh: Mesh, say: Callable[[str], None]) -> None:
        self.folder, self.pipeline, self.mesh, self.say = folder, pipeline, mesh, say
        self.recording: Recording | None = None
        self.made = 0

    def begin_step(self, left: int) -> None:
        """Begin to record with this step if it is time for that; collective. `left` steps are left, with this one."""
        if self.folder is not None and (self.made == 1 or (self.made == 0 and left == 1)):
            self.recording = Recording(self.pipeline, self.mesh.comm)

    def optimizer(self) -> AbstractContextManager[None]:
        """Mark the optimizer of the step under way."""
        return nullcontext() if self.recording is None else self.recording.optimizer()

    def reading(self) -> AbstractContextManager[None]:
        """Mark the wait for the batch of the step that comes."""
        return nullcontext() if self.recording is None else self.recording.reading()

    def end_step(self) -> None:
        """Write the trace once enough steps are recorded; collective."""
        self.made += 1
        if self.recording is not None and self.recording.steps >= RECORDED:
            self.finish()

    def finish(self) -> None:
        """Write the trace of the steps recorded so far; collective. Nothing is done where it is written."""
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.end()
            trace = recording.trace
            if trace is not None and self.folder is not None:
                self.say(
                    f"mpipipe: where the time of {counted(len(trace.records[0].steps), 'step')} went\n{trace.table()}"
                )
                try:
                    trace.write(self.folder)
                    self.say(f"mpipipe: the trace is in {self.folder}")
                except (OSError, ArgumentError) as error:  # no reason to lose a training
                    self.say(f"mpipipe: the trace cannot be written: {error}")
