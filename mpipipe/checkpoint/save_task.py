"""One checkpoint on its way to the disk: the file of each rank, at last the manifest.

    rank 0, replica 0   |part-0|                             |manifest.json|
    rank 1, replica 1   |part-1|     = all are on the disk =
    rank 2, replica 0   |part-2|
    rank 3, replica 1   |part-3|

A job that ends before the last file has its name leaves no manifest, and so no checkpoint.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeAlias

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.checkpoint import folders, tensor_files
from mpipipe.checkpoint.folders import Checkpoint
from mpipipe.checkpoint.owner import Owner
from mpipipe.errors import OwnerError
from mpipipe.files import sync_folder
from mpipipe.job import Snapshot, ThreadTask, current_rank, is_rank, wait_locally

logger = logging.getLogger("mpipipe")
PATIENCE = 1.0  # seconds that a rank which gives a save up waits for its thread
THREAD = "mpipipe checkpoint"
UNDER_WAY, ENDED, FAILED = range(3)  # the work of a rank
_stuck: list[SaveTask] = []  # given up, by ranks of this process, while a thread could not be ended
Written: TypeAlias = "dict[str, tensor_files.Content]"  # file -> what it holds


class GivenUp(Exception):
    """Ends the thread of a save that is not wanted any more."""


class SaveTask:
    """A checkpoint on its way: a thread of this rank writes the arrays of its `share`.

    work : what the thread of this rank does, or did last
    read : set once no array is read any more: until then they must not change
    sealed : whether all ranks know that all files have their names
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        owner: Owner,
        rank: int,
        share: Mapping[str, Array],
        keep: int | None,
        beforehand: Callable[[], object] | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.rank = rank
        self.keep = keep
        self.beforehand = beforehand
        # the file that this rank writes
        self.folder = checkpoint.path
        self.part = f"part-{rank}.safetensors"
        self._owner = owner
        self.read = threading.Event()
        self.sealed = False
        self._given_up = False
        self._seconds = 0.0
        self._bytes = 0
        self._all_bytes = sum(array.nbytes for array in share.values())
        self._doing = "waits for its thread"
        # after the step that the checkpoint is of
        self._ready = None
        if any(map(arrays.is_device, share.values())):
            self._ready = (arrays.current_gpu(), arrays.record())
        self.work: ThreadTask[Any] = ThreadTask(lambda: self._write(share), THREAD)
        current_rank().add_inspectable(self)
        atexit.register(self.give_up)  # a program may end without closing its saver

    def _write(self, share: Mapping[str, Array]) -> Written:
        try:
            if not share:
                return {}
            with folders.explained(self.folder), self._in_order():
                path = self.folder / self.part
                return {self.part: tensor_files.write_tensors(path, share, self, self._owner.check)}
        finally:
            self.read.set()

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Let the copies from a GPU come after the step that is saved, next to all later work."""
        if self._ready is None:
            yield
            return
        gpu, ready = self._ready
        arrays.use_gpu(gpu)  # each thread has a current GPU of its own
        with arrays.side_stream():
            arrays.wait_for(ready)
            yield

    def about_to_read(self, nbytes: int) -> None:
        if self._given_up:
            raise GivenUp
        self._doing = "writes its arrays"
        self._bytes += nbytes

    def has_read(self) -> None:
        self._doing = "waits for the disk to have its file"
        self.read.set()

    @property
    def seconds(self) -> float:
        """How long the files took on the slowest rank, as rank 0 knows, and the manifest."""
        return self._seconds + self.work.seconds

    @property
    def progress(self) -> int:
        """How far this rank is, as a number that all ranks can compare."""
        if not self.work.ended:
            return UNDER_WAY
        if self.work.problem is None:
            return ENDED
        return FAILED

    def write_manifest(self, written: Written, seconds: float) -> None:
        """Begin to write the manifest, on rank 0; the last file had its name after `seconds`."""
        if self.rank == 0:
            self._seconds = seconds
            self.work = ThreadTask(lambda: self._seal(written), THREAD)

    def _seal(self, written: Written) -> None:
        folder = self.folder
        self._doing = "writes the manifest"
        if self.beforehand is not None:
            self.beforehand()
        if self._given_up:  # the manifest would come after its file was removed otherwise
            raise GivenUp
        with folders.explained(folder):
            sync_folder(folder.parent)
            try:
                folders.write(replace(self.checkpoint, files=written), self._owner.check)
            except OwnerError:  # a file of that name is another job's
                raise
            except BaseException:  # it may have its name already
                folders.drop(folder, folders.MANIFEST)
                raise
        if self.keep is not None:
            self._doing = "removes old checkpoints"
            try:
                folders.prune(folder.parent, self.keep, just_saved=folder)
            except OSError as error:  # the new one is whole
                logger.warning("mpipipe: an old checkpoint cannot be removed: %s", error)

    def give_up(self) -> None:
        """End the thread if it ends soon, and remove what this rank wrote; no OSError comes.

        A file whose manifest rank 0 may have written stays.
        """
        self._given_up = True
        self.leave()
        if not is_rank():  # a process that was forked meanwhile
            return
        ended = self.work.wait(PATIENCE)
        if not ended:
            _stuck.append(self)
        if self._owner.is_taken():
            return  # files of these names may be another job's
        if not self.sealed:
            folders.drop(self.folder, self.part)
            with suppress(OSError):  # others have files in it
                self.folder.rmdir()
        elif self.rank == 0 and not ended:
            folders.drop(self.folder, folders.MANIFEST)

    def leave(self) -> None:
        """Nothing needs to be given up any more."""
        atexit.unregister(self.give_up)

    # -- for the report of a hang ------------------------------------------------------------------

    def progress_token(self) -> object:
        """A disk that is slow makes progress."""
        return self._bytes, self._doing, self.work.ended

    def snapshot(self) -> Snapshot:
        return Snapshot()

    def __str__(self) -> str:
        done = f"{self._bytes >> 20} of {self._all_bytes >> 20} MiB"
        return f"the checkpoint to be written: {self.folder} (a thread {self._doing}, {done} begun)"


def wait_for_given_up() -> None:
    """Return once no thread of an earlier save is at work: it may have files of the same names."""
    for task in tuple(_stuck):
        wait_locally(task.work.wait, task)
        with suppress(ValueError):  # another rank of this process has
            _stuck.remove(task)
