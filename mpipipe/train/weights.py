"""Trained parameters as files, which any number of ranks can load: not a checkpoint, since no optimizer state is kept.

    weights/stage-0.safetensors      the parameters of one logical stage, by their names in the whole model
    weights/stage-1.safetensors
    weights/model.json               sizes of the model, dtype, number of stages, a checksum of each parameter and one
                                     of these facts; written last: it vouches for the rest

Each file is written under another name and then renamed, so a file that has its name is complete. Checksums are CRC-32:
they find damage on the way to the disk and back, and files of two trainings that were mixed, but no forgery.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialized

from mpipipe import arrays
from mpipipe.comm.group import group_of
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.train import files

DESCRIPTION = "model.json"
MOST_BYTES = 64 << 20  # of it
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names of dtypes
REMEDY = "build the model with the sizes and dtype of model.json"
COPY_AGAIN = "copy the weights again from where they are whole, or train again"


@dataclass(frozen=True)
class Description:
    """What stands in model.json.

    Attributes
    ----------
    model : sizes from which the model is made again, such as the fields of models.GPT
    dtype : of the parameters: float32 for a training in bfloat16 or float16
    stages : number of files
    checksums : of each parameter, by name; None in files that were saved before there were any
    """

    model: dict
    dtype: str
    stages: int
    checksums: dict | None = None


def folder_of(run) -> Path:
    """Where the training with the output folder `run` leaves its weights."""
    return Path(run, "weights")


def save(folder, model, stages, schedule, mesh):
    """Write the parameters of a pipeline and what describes them; collective over the mesh.

    Parameters
    ----------
    folder : made where it is missing; on a file system that all hosts share
    model : dataclass of sizes
    stages : this rank's stages of `schedule`; the ranks of the first replica write theirs

    Raises ArgumentError, on every rank, where a file cannot be written.
    """
    folder, sums, group = Path(folder), {}, group_of(mesh.comm)
    with group.together("saving weights"):
        if mesh.replicas.rank == 0:
            with _explained(folder):
                folder.mkdir(parents=True, exist_ok=True)
                for stage, number in zip(stages, schedule.stages_of(mesh.pipe.rank)):
                    parameters = on_host(stage.parameters)
                    sums.update({name: checksum(array) for name, array in parameters.items()})
                    files.write_whole(folder / _file(number), serialized(parameters))
    parts = group.gather("saving weights: the checksums", sums)
    sums = {name: text for part in parts for name, text in part.items()}
    with group.together("saving weights: their description"):
        if mesh.rank == 0:
            facts = asdict(Description(asdict(model), stages[0].parameters.flat.dtype.name, schedule.stages, sums))
            facts["checksum"] = _checksum_of(facts)
            with _explained(folder):
                files.write_whole(folder / DESCRIPTION, (json.dumps(facts, indent=1) + "\n").encode())


def describe(folder) -> Description:
    """Read model.json; raises ArgumentError where there is none, or another one than `save` wrote.

    One without checksums, as it was written before there were any, is taken as it is.
    """
    path = Path(folder, DESCRIPTION)
    remedy = "name the --out folder of a training that ended; its weights are written at the end"
    try:
        facts = json.loads(files.read_text(path, MOST_BYTES))
        written = facts.pop("checksum", None) if isinstance(facts, dict) else None
        found = Description(**facts)
    except OSError as error:
        raise ArgumentError(
            f"no weights: {error.strerror}", found=str(path), expected=files.REGULAR, remedy=remedy
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise ArgumentError(f"the weights' description cannot be read: {error}", found=str(path)) from error
    if not isinstance(found.model, dict) or not isinstance(found.dtype, str) or type(found.stages) is not int:
        raise ArgumentError("the weights' description is wrong", found=f"{path}: {found}", remedy=remedy)
    if not isinstance(found.checksums, (dict, type(None))) or (written is None) != (found.checksums is None):
        raise ArgumentError("the checksums of the weights' description are wrong", found=str(path), remedy=COPY_AGAIN)
    if written is not None and written != _checksum_of(facts):
        raise ArgumentError(
            "the weights' description is damaged",
            found=f"checksum {_checksum_of(facts)} of {path}",
            expected=str(written),
            remedy=f"{COPY_AGAIN}; this file is not for editing",
        )
    return found


def load(folder, stages):
    """Set the parameters of `stages` from the files in `folder`, whatever the cut into stages they were saved with.

    Files are mapped, and only this rank's parameters are read and checked against their checksums; those of a folder
    that was saved before there were checksums load without. Raises ArgumentError for a file that is missing or damaged,
    and for a parameter that is missing, damaged, or of another shape or dtype; NonFiniteError for a parameter that has
    values that are NaN or infinite.
    """
    folder = Path(folder)
    with ExitStack() as opened:
        description, places = describe(folder), {}
        for number in range(description.stages):
            path = folder / _file(number)
            try:
                files.check_regular(path)  # opening a FIFO would wait for a writer
                file = opened.enter_context(safe_open(path, framework="numpy"))
            except (OSError, SafetensorError) as error:
                text = getattr(error, "strerror", None) or error
                raise ArgumentError(
                    f"a file of weights cannot be read: {text}",
                    found=str(path),
                    expected=files.REGULAR,
                    remedy=COPY_AGAIN,
                ) from error
            places.update({name: (file, path) for name in file.keys()})
        for stage in stages:
            for name, array in stage.parameters.items():
                values = _read(places, folder, name, array)
                _check_values(values, name, places[name][1], description.checksums)
                if arrays.is_device(array):
                    arrays.upload(values, out=array)
                else:
                    array[...] = values


def on_host(parameters):
    """name -> host array; from a GPU in one copy of the whole buffer."""
    flat, starts = arrays.download(parameters.flat), parameters.offsets
    return {name: flat[starts[name] :][: like.size].reshape(like.shape) for name, like in parameters.items()}


def checksum(array) -> str:
    """CRC-32 of the bytes of a contiguous host array, as eight hexadecimal digits."""
    return f"{crc32(array.reshape(-1).view(np.uint8)):08x}"


def _checksum_of(facts: dict) -> str:
    return f"{crc32(json.dumps(facts, sort_keys=True).encode()):08x}"


def _read(places, folder, name, like):
    """The array called `name`, if it is like `like`, which is looked up before anything is read."""
    expected = f"{like.dtype.name}{list(like.shape)}"
    if name not in places:
        raise ArgumentError(
            f"the weights have no parameter {name}",
            found=f"{len(places)} others in {folder}",
            expected=expected,
            remedy=REMEDY,
        )
    file, path = places[name]
    stored = file.get_slice(name)
    kind, shape = stored.get_dtype(), stored.get_shape()
    if STORED.get(kind) != like.dtype.name or tuple(shape) != like.shape:
        raise ArgumentError(
            f"parameter {name} does not fit the model",
            found=f"{STORED.get(kind, kind)}{shape} in {path}",
            expected=expected,
            remedy=REMEDY,
        )
    return file.get_tensor(name)


def _check_values(values, name, path, checksums):
    """Raise where values were damaged since they were saved, or are no numbers."""
    found, expected = checksum(values), None if checksums is None else checksums.get(name)
    if checksums is not None and found != expected:
        raise ArgumentError(
            f"parameter {name} is damaged: it is not what was saved",
            found=f"checksum {found} in {path}",
            expected=f"{expected}, as in {DESCRIPTION}",
            remedy=COPY_AGAIN,
        )
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):  # NaN is both of them
        count = values.size - np.count_nonzero(np.isfinite(values))
        raise NonFiniteError(
            f"parameter {name} is not finite",
            found=f"{count} of {values.size} values are NaN or infinite in {path}",
            expected="finite numbers",
            remedy="train again, with a lower learning rate or clipped gradients",
        )


@contextmanager
def _explained(folder):
    try:
        yield
    except OSError as error:
        raise ArgumentError(
            f"the weights cannot be written: {error}", found=str(folder), remedy="make room, or choose another --out"
        ) from error


def _file(stage: int) -> str:
    return f"stage-{stage}.safetensors"
