"""Trained parameters as files, which any number of ranks can load: not a checkpoint, since no optimizer state is kept.

    weights/stage-0.safetensors      the parameters of one logical stage, by their names in the whole model
    weights/stage-1.safetensors
    weights/model.json               sizes of the model, dtype, number of stages; written last: it vouches for the rest

Each file is written under another name and then renamed, so a file that has its name is complete.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialized

from mpipipe import arrays
from mpipipe.comm import share
from mpipipe.errors import ArgumentError

DESCRIPTION = "model.json"


@dataclass(frozen=True)
class Description:
    """What stands in model.json.

    Attributes
    ----------
    model : sizes from which the model is made again, such as the fields of models.GPT
    dtype : of the parameters: float32 for a training in bfloat16 or float16
    stages : number of files
    """

    model: dict
    dtype: str
    stages: int


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
    folder = Path(folder)
    with share.together(mesh.comm):
        if mesh.replicas.rank == 0:
            with _explained(folder):
                folder.mkdir(parents=True, exist_ok=True)
                for stage, number in zip(stages, schedule.stages_of(mesh.pipe.rank)):
                    _replace(folder / _file(number), serialized(on_host(stage.parameters)))
    with share.together(mesh.comm):
        if mesh.rank == 0:
            facts = asdict(Description(asdict(model), stages[0].parameters.flat.dtype.name, schedule.stages))
            with _explained(folder):
                _replace(folder / DESCRIPTION, (json.dumps(facts, indent=1) + "\n").encode())


def describe(folder) -> Description:
    """Read model.json; raises ArgumentError where there is none, or another one than `save` writes."""
    path = Path(folder, DESCRIPTION)
    remedy = "name the --out folder of a training that ended; its weights are written at the end"
    try:
        found = Description(**json.loads(path.read_text()))
    except OSError as error:
        raise ArgumentError(f"no weights: {error.strerror}", found=str(path), remedy=remedy) from error
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"the weights' description cannot be read: {error}", found=str(path)) from error
    if not isinstance(found.model, dict) or not isinstance(found.dtype, str) or type(found.stages) is not int:
        raise ArgumentError("the weights' description is wrong", found=f"{path}: {found}", remedy=remedy)
    return found


def load(folder, stages):
    """Set the parameters of `stages` from the files in `folder`, whatever the cut into stages they were saved with.

    Files are mapped, and only this rank's parameters are read. Raises ArgumentError for a file that is missing or
    damaged, and for a parameter that is missing or of another shape or dtype.
    """
    folder = Path(folder)
    with ExitStack() as files:
        places = {}
        for number in range(describe(folder).stages):
            path = folder / _file(number)
            try:
                file = files.enter_context(safe_open(path, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise ArgumentError(f"a file of weights cannot be read: {error}", found=str(path)) from error
            places.update(dict.fromkeys(file.keys(), file))
        for stage in stages:
            for name, array in stage.parameters.items():
                values = _read(places, folder, name, array)
                if arrays.is_device(array):
                    arrays.upload(values, out=array)
                else:
                    array[...] = values


def on_host(parameters):
    """name -> host array; from a GPU in one copy of the whole buffer."""
    flat, starts = arrays.download(parameters.flat), parameters.offsets
    return {name: flat[starts[name] :][: like.size].reshape(like.shape) for name, like in parameters.items()}


def _read(places, folder, name, like):
    """The array called `name`, if it is like `like`."""
    expected = f"{like.dtype.name}{list(like.shape)}"
    remedy = "build the model with the sizes and dtype of model.json"
    if name not in places:
        raise ArgumentError(
            f"the weights have no parameter {name}", found=f"{len(places)} others in {folder}", expected=expected,
            remedy=remedy,
        )
    array = places[name].get_tensor(name)
    if array.shape != like.shape or array.dtype != like.dtype:
        raise ArgumentError(
            f"parameter {name} does not fit the model",
            found=f"{array.dtype.name}{list(array.shape)} in {folder}", expected=expected, remedy=remedy,
        )
    return array


@contextmanager
def _explained(folder):
    try:
        yield
    except OSError as error:
        raise ArgumentError(f"the weights cannot be written: {error}", found=str(folder)) from error


def _file(stage: int) -> str:
    return f"stage-{stage}.safetensors"


def _replace(path: Path, content: bytes):
    """Make the file `path` in one go: write another one, then rename it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
