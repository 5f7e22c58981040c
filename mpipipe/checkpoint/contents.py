"""What a checkpoint holds of a rank: parameters and the state of an optimizer, by their names in the whole model."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.checkpoint import folders, owner
from mpipipe.checkpoint.folders import COPY_AGAIN, MANIFEST
from mpipipe.checkpoint.tensor_files import check_storable
from mpipipe.errors import ArgumentError, StorageError
from mpipipe.files import PARTIAL, sync_folder
from mpipipe.optim.optimizers import duplicate_name_error

PARAMETERS = "parameters"


Storable: TypeAlias = Any
"""A stage as far as a checkpoint knows it: nn.Stage, or a stage of your own.

It has `parameters`, arrays by their names in the whole model, which are set in place; or, in their stead,
`state_dict()`, which returns such arrays, and `load_state_dict(arrays)`, which takes them.
"""


class Optimizer(Protocol):
    """An optimizer as far as a checkpoint knows it: optim.AdamW, optim.SGD, or one of your own."""

    steps: int

    def named_state(self) -> dict[str, dict[str, Array]]:
        """Return {kind: {name of a parameter: array}}, to be set in place."""


def contents_of(stages: Sequence[Storable], optimizer: Optimizer | None) -> dict[str, Array]:
    """Return all arrays of this rank as "parameters/0.weight", "first/0.weight", ...

    Complex ones are pairs of real ones, (..., 2). Raises ArgumentError for two of one name, and for arrays that cannot
    be stored.
    """
    found: dict[str, Array] = {}
    for stage in stages:
        for name, array in arrays_of(stage).items():
            if f"{PARAMETERS}/{name}" in found:
                raise duplicate_name_error(name)
            found[f"{PARAMETERS}/{name}"] = array
    for kind, states in {} if optimizer is None else optimizer.named_state().items():
        found.update({f"{kind}/{name}": array for name, array in states.items()})
    for name, array in found.items():
        if array.flags.c_contiguous:
            found[name] = arrays.as_reals(array)
        check_storable(name, found[name])
    return found


def shares(contents: Mapping[str, Array], writers: int) -> list[dict[str, Array]]:
    """Deal arrays to so many writers for about equal bytes: each to the one that has fewest, the largest first."""
    dealt: list[dict[str, Array]] = [{} for _ in range(writers)]
    heap = [(0, writer) for writer in range(writers)]
    for name, array in sorted(contents.items(), key=lambda entry: -entry[1].nbytes):
        size, writer = heapq.heappop(heap)
        dealt[writer][name] = array
        heapq.heappush(heap, (size + array.nbytes, writer))
    return dealt


def check_plain(value: Any, place: str = "state") -> None:
    """Raise ArgumentError for what JSON would not give back as it is."""
    if isinstance(value, dict):
        for key, part in value.items():
            if type(key) is not str:
                raise ArgumentError(f"a key of {place} is no string", found=repr(key)[:80])
            check_plain(part, f"{place}[{key!r}]")
    elif type(value) is list:
        for index, part in enumerate(value):
            check_plain(part, f"{place}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ArgumentError(
            f"{place} is not plain",
            found=type(value).__name__,
            expected="dicts with strings as keys, lists, strings, numbers, booleans and None",
            remedy="convert it; arrays belong into stages",
        )


def state_of(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the caller's plain state. Raises ArgumentError if it is not plain."""
    copied = dict(state or {})
    check_plain(copied)
    result: dict[str, Any] = json.loads(json.dumps(copied))
    return result


# -- What checkpoints ask of stages and optimizers besides arrays; those of a user's own may leave each of it out -----


Announcements: TypeAlias = "list[Callable[[], object]]"  # called before anything is written to the arrays


def announcements_of(thing: Any) -> Announcements | None:
    """Return the list `before_write` of a stage or an optimizer; None if it does not tell of its writes."""
    found: Announcements | None = getattr(thing, "before_write", None)
    return found


def updates_all(optimizer: Any, stages: Sequence[Any]) -> bool:
    """Return whether all stages with something to train are those of the optimizer, as far as that says which it has.

    Others are stepped by somebody else: an optimizer of PyTorch, for example, which announces nothing.
    """
    known = getattr(optimizer, "stages", None)
    trained = [stage for stage in stages if getattr(stage, "gradients", None) is not None]
    rest = [stage for stage in trained if known is not None and not any(stage is each for each in known)]
    return not any(stage.gradients.flat.size for stage in rest)


def announced_by(stages: Sequence[Any], optimizer: Any) -> tuple[list[Announcements], bool]:
    """Return the lists of all that tell of their writes, and whether no write goes untold."""
    lists = [announcements_of(each) for each in (*stages, *([] if optimizer is None else [optimizer]))]
    known = [each for each in lists if each is not None]
    return known, optimizer is not None and len(known) == len(lists) and updates_all(optimizer, stages)


def arrays_of(stage: Any) -> Mapping[str, Array]:
    """Return what a checkpoint holds of a stage, by name: its `state_dict()` if it has one, else `parameters`."""
    give = getattr(stage, "state_dict", None)
    found: Mapping[str, Array] = stage.parameters if give is None else give()
    return found


def set_arrays(stage: Any, values: Callable[[str], Array]) -> None:
    """Let a stage with `load_state_dict` take the values by name; those of any other stage have been set in place."""
    take = getattr(stage, "load_state_dict", None)
    if take is not None:
        own = arrays_of(stage)  # complex ones were read as pairs of real ones
        take({name: values(name).view(array.dtype).reshape(array.shape) for name, array in own.items()})


def ties_of(stage: Any) -> Mapping[str, Sequence[str]]:
    """Return the names of the parameters that a stage shares, by the key of what is shared; none if it has none."""
    found: Mapping[str, Sequence[str]] = getattr(stage, "ties", {})
    return found


def sync_compute(stage: Any) -> None:
    """Let a stage renew the copy of its parameters that it computes with, where it has one."""
    renew = getattr(stage, "sync_compute", None)
    if renew is not None:
        renew()


# -- The folder of a checkpoint on the disk: made, cleaned up, and what its errors say --------------------------------


def part_of(rank: int) -> str:
    """Return the name of the file that a rank of the mesh writes."""
    return f"part-{rank}.safetensors"


def begin(folder: Path) -> None:
    """Make the folder, without what an earlier save has left in it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if folders.clear(folder):  # the old manifest must be gone before anything else in there changes
        sync_folder(folder)


def take_back(folder: Path, rank: int) -> None:
    """Remove what one rank has written for a checkpoint without a manifest; the last rank removes the folder.

    A thread may still be at work here: it cannot give its file a name that is gone.
    """
    for name in (part_of(rank) + PARTIAL, part_of(rank)):  # in this order: it may be renamed between the two
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):  # others have files in it
        folder.rmdir()


def drop_manifest(folder: Path) -> None:
    """Remove a manifest, finished or not: without it the folder is no checkpoint."""
    for name in (MANIFEST + PARTIAL, MANIFEST):
        with suppress(OSError):
            (folder / name).unlink()


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an OSError into a StorageError with the remedy."""
    try:
        yield
    except OSError as error:
        owner.check(folder)  # another job may have removed what this one was writing
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> StorageError:
    """Make the error for a folder that cannot be written to."""
    return StorageError(
        f"the checkpoint cannot be written: {error}",
        found=str(folder),
        expected="a folder with room, on a file system that all ranks share",
        remedy="make room, or choose another folder",
    )


@contextmanager
def offering(folder: Path) -> Iterator[None]:
    """Let an error name the newest whole checkpoint beside this one."""
    try:
        yield
    except ArgumentError as error:
        offer(error, folder)
        raise


def offer(error: ArgumentError, folder: Path) -> None:
    """Name the newest whole checkpoint beside `folder` in the remedy of an error that is about to be raised."""
    other = folders.other_whole(folder)
    if other is not None:
        error.remedy = f"{error.remedy or COPY_AGAIN}; the newest whole checkpoint beside it is {other}"
