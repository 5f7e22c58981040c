"""What all ranks do together before they write a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mpipipe.checkpoint import folders, storage
from mpipipe.comm.consensus import raise_on_all
from mpipipe.comm.group import Group
from mpipipe.comm.mesh import Mesh
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


def begin_folder(mesh: Mesh, group: Group, root: Path, step: int) -> Path:
    """Make the folder of a checkpoint on rank 0, and return it; raises StorageError on all ranks; collective."""
    folder = None
    with group.together("checkpoint.save: its folder"):
        if mesh.rank == 0:
            folder = folders.folder_of(root.absolute(), step)
            with storage.offering(folder), storage.explained(folder):
                storage.begin(folder)
    path: Path = group.broadcast("checkpoint.save: the folder", folder)
    return path
