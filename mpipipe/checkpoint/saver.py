"""Saving while a training goes on: threads read arrays while the next step computes.

    rank 0   step 7 | save | forwards, backwards of step 8 | optimizer | poll | step 9        | poll
    thread            |read, write ........| fsync, rename |            | manifest |
    rank 1   step 7 | save | forwards, backwards of step 8   : optimizer | poll | step 9
    thread            |read, write .........................:| fsync, rename |

Parameters and moments change in an optimizer's step alone, so nothing is copied; but for what
replicas of an optimizer have shares of: `save` puts together what this rank writes of it, on the
host. An optimizer that comes before its own rank has read everything waits for that (`:`), and for
nothing else. The threads make no call of MPI: `poll` learns how far all ranks are, and lets rank 0
write the manifest once all files have their names. One checkpoint is in flight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

from mpipipe.checkpoint import contents, folders, owner
from mpipipe.checkpoint.save_task import ENDED, FAILED, SaveTask, logger, wait_for_given_up
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, StorageError
from mpipipe.job import group_of, raise_on_all, rank_list, wait_locally, whoami
from mpipipe.optim import Optimizer, duplicate_name_error
from mpipipe.options import Values
from mpipipe.stages import StageLike


class Saver:
    """Saves checkpoints of one training while it goes on.

    Between `save` and the next step of the optimizer nothing else may write to parameters. The
    optimizers of this package and `checkpoint.load` wait for that by themselves.
    Where a write could go unnoticed (the optimizer does not have a stage, or that has no list
    `before_write`), `save` returns only once everything is read.

    A context manager, made on all ranks together. Its end finishes the save in flight; also after
    an error that all ranks raise alike. After any other error that save is given up, and what this
    rank has written of it is removed.

    Parameters
    ----------
    root, mesh, stages, optimizer, keep : see `save`
        What is saved, and where.

    Attributes
    ----------
    waited, seconds : float
        For how long this rank has waited until arrays were read. On rank 0: what the newest whole
        checkpoint took.
    """

    def __init__(
        self,
        root: str | Path,
        mesh: Mesh,
        stages: Sequence[StageLike],
        optimizer: Optimizer | None = None,
        *,
        keep: int | None = None,
    ) -> None:
        folders.check_keep(keep)
        self.root = Path(root)
        self.mesh = mesh
        self.keep = keep
        self.stages = tuple(stages)
        self.optimizer = optimizer
        self._group = group_of(mesh.comm)
        self.waited = self.seconds = 0.0
        self._compared = False  # whether no two ranks have an array of one name
        self._task: SaveTask | None = None  # the checkpoint in flight
        self._owners: list[owner.Owner] = []  # one, once a checkpoint has been begun
        self._lists, self._announced = contents.announcements_of(self.stages, optimizer)
        for functions in self._lists:
            functions.append(self.wait_until_read)

    @property
    def in_flight(self) -> bool:
        """Whether a checkpoint is being written; the same on all ranks."""
        return self._task is not None

    def save(
        self,
        step: int,
        state: Values | None = None,
        *,
        beforehand: Callable[[], object] | None = None,
    ) -> Path:
        """Begin to save the training as it is now, and return the folder; collective over the mesh.

        The folder is a checkpoint only once `poll`, `wait` or `close` has said so. The call waits
        for an earlier save that is still in flight.

        Parameters
        ----------
        step, state : see `checkpoint.save`
            What the training has to remember. What that raises is raised here, too.
        beforehand : callable, optional
            Called on rank 0, in a thread, before the manifest is written: to force to the disk what
            must not be older than the checkpoint.

        """
        self.wait()
        wait_for_given_up()
        group = self._group
        steps = None
        if self.optimizer is not None:
            steps = self.optimizer.steps
        group.agree("checkpoint.save", (("step", step), ("steps of the optimizer", steps)))
        with group.raise_together("checkpoint.save: what is to be saved"):
            content = contents.contents_of(self.stages, self.optimizer)
            plain = contents.state_of(state)
            contents.check_shards(content, self.mesh.replicas)
            if type(step) is not int or step < 0:
                raise ArgumentError("step", found=repr(step), expected="an integer of at least 0")
        self._compare_names(content)
        if not self._owners:
            self._owners.append(owner.take_folder(self.root, group, folders.explained))
        path = group.from_one(
            "checkpoint.save: its folder", lambda: folders.open_folder(self.root.absolute(), step)
        )
        share = contents.share_of(content, self.mesh.replicas, contents.state_names(self.stages))
        # The package itself is above this room, so no import.
        version = str(sys.modules["mpipipe"].__version__)
        saved = folders.Checkpoint(path, step, plain, steps, version, {})
        self._task = SaveTask(saved, self._owners[0], self.mesh.rank, share, self.keep, beforehand)
        if not self._announced:
            self.wait_until_read()
        return path

    def _compare_names(self, content: Mapping[str, object]) -> None:
        """Raise ArgumentError where two stages have an array of one name; collective."""
        if self._compared:
            return
        own_names = []
        if self.mesh.replicas.rank == 0:
            own_names = sorted(content)
        everyone = self._group.gather("checkpoint.save: the names of all ranks", own_names)
        holders = rank_list.by_text(
            (rank, name) for rank, names in enumerate(everyone) for name in names
        )
        for name, ranks in sorted(holders.items()):
            if len(ranks) > 1:
                raise_on_all(
                    ranks[1], duplicate_name_error(name.split("/", 1)[1], ranks), self._group
                )
        self._compared = True

    def poll(self) -> Path | None:
        """Return the checkpoint that is whole from now on, without waiting; collective.

        None is returned if none is in flight, or it is not whole yet. StorageError is raised on
        every rank where one of them cannot write: its files are removed, and older ones stay.
        """
        task = self._task
        if task is None:
            return None
        try:
            states = self._group.agree("checkpoint.poll", values=[task.progress])
            if (states == FAILED).any():
                problem = task.work.problem
                # rank 0 has written no manifest, and will not
                task.sealed = False
                self._give_up()
                self._group.agree("checkpoint.poll: what went wrong", error=problem)
            if not (states == ENDED).all():
                return None
            if not task.sealed:
                self._seal(task)
                return None
        except StorageError:
            raise
        except BaseException:
            self._give_up()
            raise
        task.leave()
        self._task = None
        self.seconds = task.seconds
        return task.folder

    def _seal(self, task: SaveTask) -> None:
        """Let rank 0 write the manifest; all files have their names."""
        # Rank 0 may do that now: no rank removes its file any more.
        task.sealed = True
        parts = self._group.gather(
            "checkpoint.poll: what was written", (task.work.result, task.work.seconds)
        )
        written = {name: content for part, _ in parts for name, content in part.items()}
        task.write_manifest(written, max(seconds for _, seconds in parts))

    def wait(self) -> Path | None:
        """Wait until the checkpoint in flight is whole, and return it; collective, as `poll`."""
        whole = None
        while (task := self._task) is not None:
            wait_locally(task.work.wait, task)
            whole = self.poll()
        return whole

    def wait_until_read(self) -> None:
        """Wait until this rank has read all that it saves: optimizers call it before they write."""
        task = self._task
        if task is None or task.read.is_set():
            return
        start = perf_counter()
        wait_locally(task.read.wait, task)
        self.waited += perf_counter() - start

    def close(self) -> None:
        """Finish what is in flight, and let go of the stages; collective, may be called twice."""
        try:
            self.wait()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        for functions in self._lists:
            functions.remove(self.wait_until_read)
        self._lists = []
        while self._owners:
            self._owners.pop().release()

    def _give_up(self) -> None:
        if self._task is not None:
            self._task.give_up()
            self._task = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return self.close()
        try:
            if self._group.agreed_on(error) and self._group.failure is None:  # all ranks come here
                self.wait()
            elif self.in_flight:
                # Others may wait for their disks, where they learn of nothing but failures.
                self._group.fail(
                    error, f"{whoami()} failed while it saved: {type(error).__name__}: {error}"
                )
        except StorageError as problem:  # the error that is under way comes first
            if self.mesh.rank == 0:
                logger.warning("mpipipe: %s", problem)
        finally:
            self._give_up()
            self._let_go()


# -- Saving at once: all ranks wait until the checkpoint is whole ----------------------------------


def save(
    root: str | Path,
    mesh: Mesh,
    stages: Sequence[StageLike],
    optimizer: Optimizer | None = None,
    *,
    step: int,
    state: Values | None = None,
    keep: int | None = None,
) -> Path:
    """Save a training as the folder `root`/step-00000100, as a whole; collective.

    The folder has parameters and state of the optimizer by their names in the whole model, whatever
    the mesh: see `load`. Each of the ranks with the same stages writes a share. The checkpoint is
    there as a whole or not at all. An earlier one of the same step is replaced.

    Parameters
    ----------
    root : str or Path
        Folder of the checkpoints of one training, made where it is missing; on a file system that
        all ranks share. A relative path begins in the working folder of rank 0.
    mesh : Mesh
        All ranks of the training.
    stages : sequence of stages
        This rank's stages: each an nn.Stage, or an object whose `parameters` are C-contiguous
        arrays by name, or one with `state_dict()`, which returns such arrays, and
        `load_state_dict(arrays)`, which takes them. Names are those in the whole model:
        `nn.Stage(layers, first=...)`.
    optimizer : AdamW, SGD or alike, optional
        Its `steps` and the arrays of its `named_state()`.
    step : int
        Number of steps made, the same on all ranks.
    state : dict, optional
        What else the training has to remember, small and plain: strings, numbers, booleans, None,
        lists and dicts of them. That of rank 0 is saved. For dropout it should have
        `pipeline.steps_taken`.
    keep : int, optional
        How many of the newest checkpoints in `root` stay, all by default. Old ones that cannot be
        removed are named in a warning.

    Raises
    ------
    StorageError, OwnerError
        On every rank: a file cannot be written, and older checkpoints stay as they are; another job
        saves into `root`, or has taken it from this one.
    ArgumentError, MismatchError
        On every rank: two stages, on whichever ranks, have a parameter of the same name; `state` is
        not plain; `keep` is not at least 1; ranks differ in `step` or in the steps of the
        optimizer.

    Examples
    --------
    Two ranks train; `save` in place of the saver would wait for the disk. One rank loads what they
    have saved.

    >>> import tempfile
    >>> from mpipipe import Mesh, checkpoint, nn, optim
    >>> from mpipipe.job import inprocess
    >>> folder = tempfile.mkdtemp()
    >>> def train(comm):
    ...     stage = nn.Stage([nn.Linear(4, 4)], seed=1, first=comm.rank)
    ...     optimizer = optim.AdamW([stage], lr=0.01)
    ...     with Mesh(comm, pipe=2) as mesh:
    ...         with checkpoint.Saver(folder, mesh, [stage], optimizer, keep=2) as saver:
    ...             for step in range(1, 4):
    ...                 optimizer.step()
    ...                 saver.save(step, {"loss": 2.5})
    >>> _ = inprocess.run(2, train)
    >>> def go_on(comm):
    ...     stages = [nn.Stage([nn.Linear(4, 4)], seed=2, first=number) for number in range(2)]
    ...     with Mesh(comm) as mesh:
    ...         found = checkpoint.load(folder, mesh, stages, optim.AdamW(stages, lr=0.01))
    ...     return found.step, found.state
    >>> inprocess.run(1, go_on)
    [(3, {'loss': 2.5})]
    """
    with Saver(root, mesh, stages, optimizer, keep=keep) as saver:
        path = saver.save(step, state)
        saver.wait()
    return path
