"""Saving: each rank writes a share of what its replicas have in common, and rank 0 the manifest at the end.

    rank 0, replica 0   |part-0|                             |manifest.json|
    rank 1, replica 1   |part-1|     = all are on the disk =
    rank 2, replica 0   |part-2|
    rank 3, replica 1   |part-3|

A job that ends before the last file has its name leaves no manifest, and so no checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mpipipe.checkpoint import folders, manifest, tensors
from mpipipe.checkpoint.contents import Optimizer, Storable, contents_of, shares, state_of
from mpipipe.checkpoint.manifest import Checkpoint
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ArgumentError
from mpipipe.files import sync_folder


def save(
    root: str | Path,
    mesh: Mesh,
    stages: Sequence[Storable],
    optimizer: Optimizer | None = None,
    *,
    step: int,
    state: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Save a training as the folder `root`/step-00000100; collective over the mesh.

    The folder has parameters and state of the optimizer by their names in the whole model, whatever the mesh: see
    `load`. Each of the ranks with the same stages writes a share. The checkpoint is there as a whole or not at all.
    An earlier one of the same step is replaced.

    Parameters
    ----------
    root : str or Path
        Folder of the checkpoints of one training, made where it is missing; on a file system that all ranks share. A
        relative path begins in the working folder of rank 0.
    mesh : Mesh
        All ranks of the training.
    stages : sequence of stages
        This rank's stages: each an nn.Stage, or an object whose `parameters` are C-contiguous arrays by name. Names
        are those in the whole model: `nn.Stage(layers, first=...)`.
    optimizer : AdamW, SGD or alike, optional
        Its `steps` and the arrays of its `named_state()`.
    step : int
        Number of steps made, the same on all ranks.
    state : dict, optional
        What else the training has to remember, small and plain: strings, numbers, booleans, None, lists and dicts of
        them. That of rank 0 is saved. For dropout it should have `pipeline.steps_taken`.
    keep : int, optional
        Afterwards all but so many of the newest checkpoints in `root` are removed. By default all stay.

    Returns
    -------
    Path
        The folder of the checkpoint.

    Raises
    ------
    ArgumentError
        On every rank: a file cannot be written, which leaves older checkpoints as they are; two stages have a parameter
        of the same name; `state` is not plain.
    MismatchError
        On every rank: ranks differ in `step` or in the steps of the optimizer.

    Examples
    --------
    >>> import tempfile
    >>> from mpipipe import Mesh, checkpoint, nn, optim
    >>> from mpipipe.comm import inprocess
    >>> folder = tempfile.mkdtemp()
    >>> def train(comm):
    ...     stage = nn.Stage([nn.Linear(4, 4)], seed=1, first=comm.rank)
    ...     optimizer = optim.AdamW([stage], lr=0.01)
    ...     with Mesh(comm, pipe=2) as mesh:
    ...         checkpoint.save(folder, mesh, [stage], optimizer, step=3, state={"loss": 2.5})
    >>> _ = inprocess.run(2, train)
    >>> def go_on(comm):
    ...     stages = [nn.Stage([nn.Linear(4, 4)], seed=2, first=number) for number in range(2)]
    ...     with Mesh(comm) as mesh:
    ...         found = checkpoint.load(folder, mesh, stages, optim.AdamW(stages, lr=0.01))
    ...     return found.step, found.state
    >>> inprocess.run(1, go_on)
    [(3, {'loss': 2.5})]
    """
    group = group_of(mesh.comm)
    steps = None if optimizer is None else optimizer.steps
    group.agree("checkpoint.save", (("step", step), ("steps of the optimizer", steps)))
    folder = None
    with group.together("checkpoint.save: what is to be saved"):
        contents = contents_of(stages, optimizer)
        plain = state_of(state)
        folders.check_keep(keep)
        if type(step) is not int or step < 0:
            raise ArgumentError("step", found=repr(step), expected="an integer of at least 0")
        if mesh.rank == 0:
            folder = folders.folder_of(Path(root).absolute(), step)
            with _explained(folder):
                _begin(folder)
    path: Path = group.broadcast("checkpoint.save: the folder", folder)
    written = _write_share(path, contents, mesh)
    with group.together("checkpoint.save: the manifest"):
        if mesh.rank == 0:
            with _explained(path):
                manifest.write(Checkpoint(path, step, plain, steps, _version(), written))
        if mesh.rank == 0 and keep is not None:
            folders.prune(path.parent, keep)
    return path


def _begin(folder: Path) -> None:
    """Make the folder, without what an earlier save has left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    folders.clear(folder)
    sync_folder(folder)
    sync_folder(folder.parent)


def _write_share(folder: Path, contents: Mapping[str, Any], mesh: Mesh) -> dict[str, tensors.Content]:
    """Write this rank's part of what its replicas have; return what every file holds."""
    name, written = f"part-{mesh.rank}.safetensors", {}
    group = group_of(mesh.comm)
    share = shares(contents, mesh.replicas.size)[mesh.replicas.rank]
    try:
        with group.together("checkpoint.save: the arrays"):
            if share:
                with _explained(folder):
                    written = {name: tensors.write(folder / name, share)}
    except BaseException:
        with suppress(OSError):  # a full disk gets its room back
            (folder / name).unlink(missing_ok=True)
        raise
    everyone = group.gather("checkpoint.save: what was written", written)
    return {name: content for part in everyone for name, content in part.items()}


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn an OSError into an ArgumentError with the remedy."""
    try:
        yield
    except OSError as error:
        other = folders.other_whole(folder)
        raise ArgumentError(
            f"the checkpoint cannot be written: {error}",
            found=str(folder),
            expected="a folder with room, on a file system that all ranks share",
            remedy="make room, or choose another folder"
            + ("" if other is None else f"; the newest whole checkpoint is {other}"),
        ) from error


def _version() -> str:
    return str(sys.modules["mpipipe"].__version__)  # the package itself: above this room, so no import
