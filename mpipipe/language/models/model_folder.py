"""The one place where a folder that holds a model is opened, by whatever program it was written.

    what is in the folder, or below it     kind
    weights/step-.../                      "weights": a training of mpipipe that ended
    config.json                            "huggingface": a model of Hugging Face
    manifest.json, step-.../, checkpoints/ "checkpoint": the newest of a training of mpipipe

The kinds are looked for in this order. Opening reads a description and no parameters: one rank
opens for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mpipipe import arrays, checkpoint, files, nn
from mpipipe.arrays import Array, Shape
from mpipipe.attention import Local
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job import Communicator, group_of
from mpipipe.language.data.tokenizer import NAME, Tokenizer, open_tokenizer
from mpipipe.language.models import huggingface, weights
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.huggingface import writing
from mpipipe.language.models.huggingface.folder import INDEX, PICKLES, SINGLE, check_finite
from mpipipe.language.models.huggingface.options import CONFIG, read_json
from mpipipe.language.models.huggingface.reading import copy_to
from mpipipe.nn import announce_write, is_adapter
from mpipipe.options import Values
from mpipipe.planning import declared
from mpipipe.train import shared_path

GENERATION = "generation_config.json"
PREFIX = f"{checkpoint.PARAMETERS}/"  # names in a checkpoint begin so
TRAIN_AGAIN = "train again, with a lower learning rate or clipped gradients"


@dataclass(frozen=True)
class ModelFolder:
    """A model on a disk: plain data, which can be sent to other ranks.

    path : the folder that has the parameters, and the tokenizer
    dtype : of the parameters, and by default of what a loaded model computes: float32 or float64
    inode : of the folder when it was opened
    kind : what `convert` calls it
    origin : what goes along when the model is written again
    folder : with the tensors of a model of Hugging Face; None for what a training has left
    """

    path: Path
    dtype: str
    inode: int | None
    kind: str
    origin: huggingface.Origin
    model: GPT
    folder: huggingface.Folder | None = None

    def read(self, parameters: Mapping[str, Array]) -> None:
        """Set arrays by their names in the model."""
        if self.folder is not None:
            huggingface.read(self.folder, parameters)
            return
        saved = checkpoint.read(self.path)
        for name, array in parameters.items():
            values = np.empty(array.shape, self.dtype)
            checkpoint.read_arrays(saved, {f"{PREFIX}{name}": values})
            check_finite(values, f"parameter {name}", self.path, TRAIN_AGAIN)
            copy_to([array], values.astype(array.dtype, copy=False))

    def load(self, stages: Sequence[nn.Stage], mesh: Mesh) -> None:
        """Set the parameters of this rank's stages, and read no others; collective."""
        group = group_of(mesh.comm)
        with group.raise_together("loading the model"):
            announce_write(*stages)
            self.read(weights.own_arrays(stages))
            for stage in stages:
                stage.sync_compute()
        with group.raise_together("loading the model: whether it is one"):
            if group.rank == 0 and identity_of(self.path) != self.inode:  # it opened the folder
                raise ArgumentError(
                    "the model was replaced while it was read",
                    found=f"another folder {self.path} than at the beginning",
                    expected="parameters that are all of one model",
                    remedy="start again: a training has left a new model there",
                )

    def with_slices(self, count: int) -> ModelFolder:
        """Return the folder of the model with its head in `count` slices, or raise ConfigError."""
        if self.folder is not None:
            model = replace(self.model, head_slices=count)
            return replace(self, model=model, folder=replace(self.folder, model=model))
        slices = self.model.head_slices
        if slices != count:
            raise ConfigError(
                "the weights to begin with have their head in other slices",
                found=f"head_slices = {slices} in {self.path}",
                expected=f"{count}, as the configuration has it",
                remedy=f"give head_slices = {slices}, or `mpipipe convert` them into a folder of "
                "Hugging Face",
            )
        return self

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end an answer: eos_token_id of generation_config.json, or of config.json."""
        path = self.path / GENERATION
        if path.exists():
            facts: Values = read_json(path, "copy the folder again, or leave that file out")
        else:
            facts = self.origin.config
        ids = facts.get("eos_token_id")
        if not isinstance(ids, list):
            ids = [ids]
        vocab = self.model.vocab
        return tuple(end for end in ids if type(end) is int and 0 <= end < vocab)

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer in the folder, None for a model of bytes; one rank calls this."""
        if (self.path / NAME).exists():
            return open_tokenizer(self.path)
        return None


def identity_of(path: Path) -> int | None:
    """Return a number of this folder, until it is replaced; None if it is gone."""
    with suppress(OSError):
        return path.stat().st_ino
    return None


def _open_training(path: Path) -> ModelFolder | None:
    """Open the checkpoint at `path`, or the newest one below it; None if there is none."""
    folder: Path | None = path
    if not files.exists(path / checkpoint.MANIFEST):
        folder = checkpoint.newest(checkpoint.standing_folder(path))
    if folder is None:
        return None
    inode = identity_of(folder)
    saved = checkpoint.read(folder)
    sizes = saved.state.get("model")
    dtypes = {}
    for content in saved.files.values():
        for name, entry in content.arrays.items():
            if name.startswith(PREFIX):
                dtypes[name] = checkpoint.NAMES[entry.dtype]
    if not isinstance(sizes, dict) or not dtypes:
        raise ConfigError(
            "the checkpoint is not one of `mpipipe train`",
            found=str(folder),
            expected="the sizes of its model",
            remedy="load it with mpipipe.checkpoint",
        )
    if any(map(is_adapter, dtypes)):
        raise ConfigError(
            "the checkpoint has adapters apart from their matrices",
            found=str(folder),
            expected="a plain model",
            remedy="let the training end: it leaves the model with its adapters merged; or go "
            "on with --resume",
        )
    try:
        model = GPT(**sizes)
    except (TypeError, ArgumentError) as error:
        message = f"the sizes of the model are not those of a GPT: {error}"
        raise ConfigError(message, found=str(folder)) from error
    kind = "checkpoint"
    if folder.parent.name == weights.FOLDER:
        kind = weights.FOLDER
    origin = huggingface.Origin.of(folder)
    dtype = next(iter(dtypes.values()))
    return ModelFolder(folder, dtype, inode, kind, origin, model)


def _open_huggingface(path: Path) -> ModelFolder | None:
    """Open the folder with config.json and safetensors at `path`; None if there is none."""
    path = checkpoint.standing_folder(path)
    # Tensors without a config.json are such a folder, too, and an error when it is opened.
    names = (CONFIG, SINGLE, INDEX, *PICKLES)
    if not any(files.exists(path / name) for name in names):
        return None
    inode = identity_of(path)
    opened = huggingface.open_folder(path)
    # float32 holds bfloat16 and float16 as they are
    dtype = "float32"
    if (opened.config.get("dtype") or opened.config.get("torch_dtype")) == "float64":
        dtype = "float64"
    origin = huggingface.Origin(path, opened.config)
    return ModelFolder(path, dtype, inode, "huggingface", origin, opened.model, opened)


def open_model(path: str | Path) -> ModelFolder:
    """Open the model at `path`; one rank calls this. Raises ArgumentError."""
    path = Path(path)
    folder = None
    state = checkpoint.newest_state(path)
    if state is not None:
        folder = _open_training(state)
    folder = folder or _open_huggingface(path) or _open_training(path)
    if folder is not None:
        return folder
    raise ArgumentError(
        "no model is here",
        found=f"{path}, {'a folder without one' if files.is_folder(path) else 'no folder'}",
        expected="the output folder of a training, one of its checkpoints, or a folder of Hugging "
        "Face",
        remedy="name the --out folder of a training that ended; its weights are written at the "
        "end. Of a task of your own mpipipe.train.load opens the folder; an adapter becomes a "
        "model by merge_and_unload of PEFT",
    )


def open_on_all(comm: Communicator, path: str) -> ModelFolder:
    """Return the model that rank 0 opens at `path`, on every rank; collective."""
    absolute = shared_path(comm, path)
    return group_of(comm).from_one("opening the model", lambda: open_model(absolute))


# -- A folder turned into one of Hugging Face, by one process, in groups of layers


def convert(
    source: str | Path,
    target: str | Path,
    dtype: str | None = None,
    most: int = writing.SHARD_BYTES,
) -> str:
    """Turn a folder into one of Hugging Face.

    `dtype` is by default that of the old files, and float32 for halves. A file has `most` bytes, or
    one layer. Returns a line about what was done. No folder is left where an error is raised.
    """
    folder = open_model(source)
    kind = dtype or folder.dtype
    model = folder.model
    if kind not in writing.FLOATS:
        raise ConfigError(
            "the dtype of a folder of Hugging Face",
            found=kind,
            expected=" or ".join(writing.FLOATS),
        )
    groups = groups_of(model, most, arrays.dtype(kind).itemsize)

    def read(shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
        values = {name: np.empty(shape, folder.dtype) for name, shape in shapes.items()}
        folder.read(values)
        return values

    huggingface.save(Path(target), model, groups, read, dtype=kind, origin=folder.origin)
    what = f"{writing.config_of(model, kind, folder.origin)[0].architecture} in {kind}"
    return (
        f"converted {folder.path} ({folder.kind}) into {target}: {what}, {model.parameters:,} "
        "parameters"
    )


def groups_of(model: GPT, most: int, itemsize: int) -> list[dict[str, Shape]]:
    """Return names and shapes of parameters in groups of layers of at most `most` bytes."""
    shapes: dict[int, dict[str, Shape]] = {}
    sizes: Counter[int] = Counter()
    for name, entry in declared(model.build(Local())).items():
        # The slices of a head are one tensor, and one group.
        layer = min(int(name.partition(".")[0]), 2 * model.layers + 1)
        shapes.setdefault(layer, {})[name] = entry.shape
        sizes[layer] += entry.size * itemsize
    groups: list[dict[str, Shape]] = []
    filled = 0
    for layer, size in sizes.items():
        if not groups or filled + size > most:
            groups.append({})
            filled = 0
        groups[-1].update(shapes[layer])
        filled += size
    return groups
