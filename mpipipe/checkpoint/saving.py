"""Saving at once: all ranks wait until the checkpoint is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpipipe.checkpoint.contents import Optimizer, Storable
from mpipipe.checkpoint.saver import Saver
from mpipipe.comm.mesh import Mesh


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
    """Save a training as the folder `root`/step-00000100; collective over the mesh. It returns once that is whole.

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
        This rank's stages: each an nn.Stage, or an object whose `parameters` are C-contiguous arrays by name, or one
        with `state_dict()`, which returns such arrays, and `load_state_dict(arrays)`, which takes them. Names are
        those in the whole model: `nn.Stage(layers, first=...)`.
    optimizer : AdamW, SGD or alike, optional
        Its `steps` and the arrays of its `named_state()`.
    step : int
        Number of steps made, the same on all ranks.
    state : dict, optional
        What else the training has to remember, small and plain: strings, numbers, booleans, None, lists and dicts of
        them. That of rank 0 is saved. For dropout it should have `pipeline.steps_taken`.
    keep : int, optional
        Afterwards all but so many of the newest checkpoints in `root` are removed. By default all stay. Old ones that
        cannot be removed are told of in a warning.

    Returns
    -------
    Path
        The folder of the checkpoint.

    Raises
    ------
    StorageError
        On every rank: a file cannot be written. What was written of this checkpoint is removed, and older ones stay as
        they are.
    ArgumentError
        On every rank: two stages, on whichever ranks, have a parameter of the same name; `state` is not plain; `keep`
        is not at least 1.
    MismatchError
        On every rank: ranks differ in `step` or in the steps of the optimizer.
    OwnerError
        On every rank: another job saves into `root`, or has taken it from this one.

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
    with Saver(root, mesh, stages, optimizer, keep=keep) as saver:
        path = saver.save(step, state)
        saver.finish()
    return path
