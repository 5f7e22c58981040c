"""What all ranks do together before they write a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpipipe.arrays import Array
from mpipipe.checkpoint import folders, owner, storage
from mpipipe.checkpoint.contents import Optimizer, Storable, contents_of, state_of
from mpipipe.comm.consensus import raise_on_all
from mpipipe.comm.group import Group
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ArgumentError
from mpipipe.optim.named import same_name


def check_names(mesh: Mesh, group: Group, contents: Collection[str]) -> None:
    """Raise ArgumentError on all ranks where ranks with different stages have an array of one name; collective.

    Such a checkpoint could be written, and not be read.
    """
    own = sorted(contents) if mesh.replicas.rank == 0 else []
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(group.gather("checkpoint.save: the names of all ranks", own)):
        for name in names:
            holders.setdefault(name, []).append(rank)
    for name, ranks in sorted(holders.items()):
        if len(ranks) > 1:
            raise_on_all(ranks[1], same_name(name.split("/", 1)[1], ranks), group)


def checked_contents(
    stages: Sequence[Storable], optimizer: Optimizer | None, step: int, state: Mapping[str, Any] | None
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays and the plain values to be saved. Raises ArgumentError."""
    contents, plain = contents_of(stages, optimizer), state_of(state)
    if type(step) is not int or step < 0:
        raise ArgumentError("step", found=repr(step), expected="an integer of at least 0")
    return contents, plain


def begin_folder(mesh: Mesh, group: Group, root: Path, step: int) -> Path:
    """Make the folder of a checkpoint on rank 0, and return it; raises StorageError on all ranks; collective."""
    folder = None
    with group.together("checkpoint.save: its folder"):
        if mesh.rank == 0:
            folder = folders.folder_of(root.absolute(), step)
            owner.check(folder)
            with storage.offering(folder), storage.explained(folder):
                storage.begin(folder)
    path: Path = group.broadcast("checkpoint.save: the folder", folder)
    return path
