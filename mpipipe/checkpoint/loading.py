"""Loading: rank 0 reads the manifest, and each rank its arrays, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mpipipe import files
from mpipipe.arrays import Array
from mpipipe.checkpoint import folders
from mpipipe.checkpoint.contents import PARAMETERS, check_shards, contents_of
from mpipipe.checkpoint.folders import COPY_AGAIN, MANIFEST, Checkpoint
from mpipipe.checkpoint.tensor_files import DTYPES, open_tensors
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError
from mpipipe.job import group_of
from mpipipe.nn import announce_write
from mpipipe.optim import Optimizer, StateShard
from mpipipe.stages import StageLike, as_stages

OTHER_MODEL = (
    "build the model with the sizes and the dtype, and take the optimizer, of when the checkpoint "
    "was saved; or load parameters alone"
)


def load(
    path: str | Path, mesh: Mesh, stages: Sequence[StageLike], optimizer: Optimizer | None = None
) -> Checkpoint:
    """Set parameters and the state of an optimizer from a checkpoint; collective over the mesh.

    The mesh and the cut into stages may be others than those that saved it: arrays are found by
    their names, and each rank reads those that it has. Checksums are compared. Nothing in a
    checkpoint is code, and nothing is unpickled.

    Parameters
    ----------
    path : str or Path
        A checkpoint, or a folder with some: then the newest is taken. A relative path begins in the
        working folder of rank 0.
    mesh, stages : see `save`
        In half precision stages also renew the copy that they compute with.
    optimizer : AdamW, SGD or alike, optional
        Its state and its `steps` are set. None reads parameters alone.

    Raises
    ------
    ArgumentError
        On every rank, with the name of the file: there is none, it is damaged or of a newer format,
        or its arrays are not those of the model or of the optimizer. After an error the stages hold
        values of no use.
    """
    group = group_of(mesh.comm)
    adapters = as_stages(stages)
    with group.raise_together("checkpoint.load: the arrays to set"):
        contents = contents_of(adapters, optimizer)
        check_shards(contents, mesh.replicas)
        targets = {}
        for name, array in contents.items():
            if isinstance(array, StateShard) and not array.part.size and array.copy is None:
                continue
            # a stage may hand out what must not be written to
            is_fixed = isinstance(array, np.ndarray) and not array.flags.writeable
            targets[name] = np.empty_like(array) if is_fixed else array
    saved = group.from_one("checkpoint.load: the manifest", lambda: read(path))
    names = []
    if mesh.replicas.rank == 0:
        names = list(contents)
    all_names = set().union(*group.gather("checkpoint.load: the names of all ranks", names))
    with group.raise_together("checkpoint.load: the arrays"):
        _check_names(saved, all_names, optimizer)
        # a save that still reads these arrays finishes first
        writers = (*adapters, optimizer)
        announce_write(*[item for item in writers if hasattr(item, "before_write")])
        read_arrays(saved, targets)
        if optimizer is not None:
            optimizer.steps = saved.optimizer_steps or 0
        for stage in adapters:
            stage.set_contents(lambda name: targets[f"{PARAMETERS}/{name}"])
            stage.sync_compute()
    return saved


def read(path: str | Path) -> Checkpoint:
    """Read a checkpoint, or the newest in a folder, without its arrays; on one rank.

    Raises ArgumentError where there is none, or its manifest is damaged or of a newer format.
    """
    path = Path(path).absolute()
    folder: Path | None = path
    if not files.exists(path / MANIFEST):
        folder = folders.newest(path)
    if folder is None:
        raise ArgumentError(
            "no checkpoint is here",
            found=str(path),
            expected=f"a folder step-... with {MANIFEST}, or a folder with some of these",
            remedy="name another folder; a save that was cut short leaves no manifest, and cannot "
            "be read",
        )
    return folders.read(folder)


def _check_names(saved: Checkpoint, model_names: set[str], optimizer: Optimizer | None) -> None:
    """Raise ArgumentError unless the checkpoint has just the arrays of all ranks."""
    names = set().union(*(content.arrays for content in saved.files.values()))
    if optimizer is not None and saved.optimizer_steps is None:
        raise ArgumentError(
            "the checkpoint has no state for this optimizer",
            found=f"no optimizer in {saved.path / MANIFEST}",
            remedy=OTHER_MODEL,
        )
    for name in [*sorted(model_names - names), *sorted(names - model_names)]:
        if optimizer is not None or name.startswith(f"{PARAMETERS}/"):
            text = "has an array that the model does not:"
            if name in model_names:
                text = "has no array"
            raise ArgumentError(
                f"the checkpoint {text} {name}",
                found=f"{len(names)} arrays in {saved.path / MANIFEST}",
                expected=f"the same names; {len(names ^ model_names)} differ",
                remedy=OTHER_MODEL,
            )


def read_arrays(saved: Checkpoint, targets: Mapping[str, Array | StateShard]) -> None:
    """Set arrays, by their names in a checkpoint; shapes and dtypes are compared before.

    Raises ArgumentError, with the name of the file. One rank may call this.
    """
    file_of = {}
    for file, content in saved.files.items():
        file_of.update(dict.fromkeys(content.arrays, file))
    names_in: dict[str, list[str]] = {}
    for name, target in targets.items():
        if name not in file_of:
            raise ArgumentError(
                f"the checkpoint has no array {name}", found=str(saved.path), remedy=OTHER_MODEL
            )
        file = file_of[name]
        names_in.setdefault(file, []).append(name)
        entry = saved.files[file].arrays[name]
        kind = DTYPES[target.dtype.name]
        if (entry.dtype, entry.shape) != (kind, target.shape):
            raise ArgumentError(
                f"{name} does not fit the model",
                found=f"{entry.dtype}{list(entry.shape)} in {saved.path / file}",
                expected=f"{kind}{list(target.shape)}",
                remedy=OTHER_MODEL,
            )
    what = "a file of the checkpoint"
    says = f"what {MANIFEST} says"
    for file, names in names_in.items():
        with open_tensors(saved.path / file, what, says, COPY_AGAIN, saved.files[file]) as reader:
            for name in names:
                target = targets[name]
                values: Array = target
                if isinstance(target, StateShard):
                    values = np.empty(target.shape, target.dtype)
                checksum = reader.read_summed(name, values)
                expected = reader.arrays[name].checksum
                if checksum != expected:
                    raise ValueError(f"{name} has the checksum {checksum} and not {expected}")
                if isinstance(target, StateShard):
                    target.take(values)
