"""The one place where a folder that holds a model is opened, whoever wrote it.

    what is in the folder, or below it     kind
    weights/model.json, or model.json      "weights": a training of mpipipe that ended
    config.json, or huggingface/           "huggingface": a model of Hugging Face, also one that a training has left
    manifest.json, step-.../, checkpoints/ "checkpoint": a training of mpipipe, the newest of several
    adapter_config.json                    "adapter": an adapter of PEFT, which names the folder of its model

A kind is a class that finds its own folders: `find` says where below a path they are, and `open` describes one. The
kinds are asked in the order of `KINDS`. Opening reads a description and no parameters, so one rank opens for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mpipipe import checkpoint, files, nn
from mpipipe.checkpoint import folders
from mpipipe.checkpoint.contents import PARAMETERS
from mpipipe.checkpoint.whole_folder import check_same, identity, standing
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job.group import group_of
from mpipipe.job.types import Communicator
from mpipipe.language.data.tokenizer import NAME, Tokenizer, open_tokenizer
from mpipipe.language.models import GPT, huggingface, weights
from mpipipe.language.models.huggingface.adapter import (
    ADAPTER_CONFIG,
    AdapterFolder,
    is_adapter_folder,
    merge_adapter,
    open_adapter,
)
from mpipipe.language.models.huggingface.families import Family, expressed
from mpipipe.language.models.huggingface.folder import INDEX, PICKLES, SINGLE
from mpipipe.language.models.huggingface.options import CONFIG, read_json
from mpipipe.nn.lora import is_adapter
from mpipipe.nn.write_hooks import announce_write
from mpipipe.train.output_folder import shared_path

# -- The folders that a training leaves, as models: its weights, and its checkpoints ----------------------------------


@dataclass(frozen=True)
class WeightsFolder:
    """The weights that a training writes at its end; see model_folder.ModelFolder."""

    path: Path
    sizes: Mapping[str, Any]  # of the model
    dtype: str
    kind: str = "weights"
    inode: int | None = None  # of the folder when it was opened

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return `path` or the folder weights/ in it, whichever has a model.json."""
        places = (standing(path), standing(weights.folder_of(path)))
        return next((place for place in places if files.exists(place / weights.DESCRIPTION)), None)

    @classmethod
    def open(cls, folder: Path) -> WeightsFolder:
        """Read model.json. Raises ArgumentError for one that is damaged."""
        inode = identity(folder)
        found = weights.describe(folder)
        return cls(folder, found.model, found.dtype, inode=inode)

    @property
    def model(self) -> GPT:
        """The model of these sizes. Raises ConfigError if they are not those of a GPT."""
        return model_of(self.sizes, self.path)

    def load(self, stages: Sequence[nn.Stage], mesh: Mesh) -> None:
        """Set the parameters of this rank's stages; collective over the mesh."""
        group = group_of(mesh.comm)
        with group.raise_together("loading the weights"):
            weights.load(self.path, stages, casts=True)
        with group.raise_together("loading the weights: whether they are of one model"):
            if group.rank == 0:  # which has opened the folder
                check_same(self.path, self.inode)

    @property
    def ends(self) -> tuple[int, ...]:
        """What the files that came along with the model say; none if it came from no folder of Hugging Face."""
        return ends_in(self.path, huggingface.Origin.of(self.path).config, self.model.vocab)

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer that came along with the model, None for a model of bytes."""
        return tokenizer_in(self.path)


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint of a training; see model_folder.ModelFolder."""

    path: Path
    sizes: Mapping[str, Any]  # of the model
    dtype: str
    kind: str = "checkpoint"
    ends: tuple[int, ...] = ()

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return `path` if it is a checkpoint, else the newest one in it."""
        return path if files.exists(path / folders.MANIFEST) else folders.newest(path)

    @classmethod
    def open(cls, folder: Path) -> CheckpointFolder:
        """Read the manifest. Raises ArgumentError for one that is damaged, and for one of another script's training."""
        found = checkpoint.read(folder)
        sizes = found.state.get("model")
        arrays = {name: entry for content in found.files.values() for name, entry in content.arrays.items()}
        kept = [entry for name, entry in arrays.items() if name.startswith(f"{PARAMETERS}/")]
        if not isinstance(sizes, dict) or not kept:
            raise ConfigError(
                "the checkpoint is not one of `mpipipe train`",
                found=str(folder),
                expected="the sizes of its model",
                remedy="load it with mpipipe.checkpoint",
            )
        if any(is_adapter(name) for name in arrays):
            raise ConfigError(
                "the checkpoint has adapters apart from their matrices",
                found=str(folder),
                expected="a plain model",
                remedy="let the training end: it leaves the model with its adapters merged; or go on with --resume",
            )
        return cls(folder, sizes, kept[0].kind.name)

    @property
    def model(self) -> GPT:
        """The model of these sizes. Raises ConfigError if they are not those of a GPT."""
        return model_of(self.sizes, self.path)

    def load(self, stages: Sequence[nn.Stage], mesh: Mesh) -> None:
        """Set the parameters of this rank's stages; collective over the mesh."""
        checkpoint.load(self.path, mesh, stages)

    def tokenizer(self) -> None:
        """Return None: the model is one of bytes."""


def model_of(sizes: Mapping[str, Any], place: Path) -> GPT:
    """Return the GPT of these sizes. Raises ConfigError, with the place, where they are not those of one."""
    try:
        return GPT(**sizes)
    except (TypeError, ArgumentError) as error:
        raise ConfigError(f"the sizes of the model are not those of a GPT: {error}", found=str(place)) from error


# -- A folder of Hugging Face, as one of the kinds of model folders that are opened; see model_folder -----------------


INSIDE = "huggingface"  # the folder in which a training leaves one


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A model with config.json and safetensors; see model_folder.ModelFolder."""

    folder: huggingface.Folder
    kind: str = "huggingface"
    inode: int | None = None  # of the folder when it was opened

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return `path` or the folder huggingface/ in it, whichever has a config.json, or tensors without one."""
        names = (CONFIG, SINGLE, INDEX, *PICKLES)
        places = (standing(path), standing(path / INSIDE))
        return next((at for at in places if any(files.exists(at / name) for name in names)), None)

    @classmethod
    def open(cls, folder: Path) -> HuggingFaceFolder:
        """Read config.json and the names of the tensors. Raises ArgumentError, which names file and entry."""
        inode = identity(folder)
        return cls(huggingface.open_folder(folder), inode=inode)

    @property
    def path(self) -> Path:
        """The folder."""
        return self.folder.path

    @property
    def model(self) -> GPT:
        """The description."""
        return self.folder.model

    @property
    def dtype(self) -> str:
        """float64 where config.json says so, else float32, which holds bfloat16 and float16 as they are."""
        stored = self.folder.config.get("dtype") or self.folder.config.get("torch_dtype")
        return "float64" if stored == "float64" else "float32"

    def load(self, stages: Sequence[nn.Stage], mesh: Mesh) -> None:
        """Set the parameters of this rank's stages; collective over the mesh."""
        group = group_of(mesh.comm)
        with group.raise_together("loading the model folder"):
            announce_write(*stages)
            huggingface.read(self.folder, {name: array for each in stages for name, array in each.parameters.items()})
            for stage in stages:
                stage.sync_compute()
        with group.raise_together("loading the model folder: whether it is one model"):
            if group.rank == 0:  # which has opened the folder
                check_same(self.path, self.inode)

    @property
    def ends(self) -> tuple[int, ...]:
        """What generation_config.json says, else config.json: `eos_token_id`, one or several; of those that there are.

        Raises ArgumentError if the first cannot be read.
        """
        return ends_in(self.path, self.folder.config, self.model.vocab)

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer in the folder, None if there is none. Raises DataError or BackendError."""
        return tokenizer_in(self.path)


# -- A folder with an adapter of PEFT, as a model: the one that it was made for, with the adapter merged into it ------


BASES = (WeightsFolder, HuggingFaceFolder, CheckpointFolder)
BASE = "base_model_name_or_path"


@dataclass(frozen=True)
class AdaptedFolder:
    """An adapter and its model; see model_folder.ModelFolder."""

    adapter: AdapterFolder
    base: WeightsFolder | CheckpointFolder | HuggingFaceFolder
    kind: str = "adapter"

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return `path` if an adapter is there."""
        return standing(path) if is_adapter_folder(standing(path)) else None

    @classmethod
    def open(cls, folder: Path) -> AdaptedFolder:
        """Read the descriptions of the adapter and of its model. Raises ConfigError if the model is not there."""
        adapter = open_adapter(folder)
        name = read_json(folder / ADAPTER_CONFIG, "").get(BASE)
        for kind in BASES if type(name) is str else ():
            found = kind.find(Path(folder, str(name)))
            if found is not None:
                return cls(adapter, kind.open(found))
        raise ConfigError(
            "the model that an adapter was made for is not there",
            found=f"{BASE} = {name!r} in {folder / ADAPTER_CONFIG}",
            expected="the folder of a model, seen from the folder of the adapter or as an absolute path",
            remedy="write the place of the model into that file",
        )

    @property
    def path(self) -> Path:
        """The folder of the model, where its tokenizer is, too."""
        return self.base.path

    @property
    def model(self) -> GPT:
        """The description of the model."""
        return self.base.model

    @property
    def family(self) -> Family:
        """The family by whose names the adapter calls its matrices."""
        return expressed(self.model, huggingface.Origin.of(self.path).family)[0]

    @property
    def dtype(self) -> str:
        """As of the model."""
        return self.base.dtype

    def load(self, stages: Sequence[nn.Stage], mesh: Mesh) -> None:
        """Set the parameters of this rank's stages; collective over the mesh."""
        self.base.load(stages, mesh)
        with group_of(mesh.comm).raise_together("merging the adapter"):
            own = {name: array for stage in stages for name, array in stage.parameters.items()}
            merge_adapter(self.adapter, self.family, self.model, own)
            for stage in stages:
                stage.sync_compute()

    @property
    def ends(self) -> tuple[int, ...]:
        """As of the model."""
        return self.base.ends

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the model, None for one of bytes."""
        return self.base.tokenizer()


# -- The one place where a folder that holds a model is opened, whoever wrote it --------------------------------------


class FolderTokenizer(Protocol):
    """What turns text into token ids and back; a model of bytes has none."""

    @property
    def vocab(self) -> int:
        """Number of token ids: each id is below it."""

    @property
    def end(self) -> int | None:
        """Id of the token behind a document, None if there is none."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with what the tokenizer puts before it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""


class ModelFolder(Protocol):
    """A model on a disk: plain data, which can be sent to other ranks.

    path : the folder that has the parameters
    kind : who wrote it, and how: "weights", "checkpoint", ...
    dtype : in which the parameters are stored, and in which a model that is loaded computes by default: float32 or
        float64
    """

    @property
    def path(self) -> Path: ...

    @property
    def kind(self) -> str: ...

    @property
    def model(self) -> GPT:
        """The description of the model. Raises ConfigError if the folder has sizes that no GPT has."""

    @property
    def dtype(self) -> str: ...

    def load(self, stages: Sequence[nn.Stage], mesh: Mesh) -> None:
        """Set the parameters of this rank's stages, of which it reads its own alone; collective over the mesh.

        Raises ArgumentError or NonFiniteError, on every rank, with the names of file and parameter.
        """

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids of the tokens at which the folder says that an answer ends; none if it does not say so."""

    def tokenizer(self) -> FolderTokenizer | None:
        """Return the tokenizer that is in the folder, None for a model of bytes; one rank calls this.

        Raises ArgumentError if it cannot be read.
        """


class Kind(Protocol):
    """A class of model folders."""

    def find(self, path: Path) -> Path | None:
        """Return the folder of this kind that is at `path` or below it, None if there is none. Nothing is read."""

    def open(self, folder: Path) -> ModelFolder:
        """Read the description in a folder that `find` has found. Raises ArgumentError."""


KINDS: tuple[Kind, ...] = (WeightsFolder, HuggingFaceFolder, CheckpointFolder, AdaptedFolder)


def open_model(path: str | Path) -> ModelFolder:
    """Open the model at `path`; one rank calls this.

    Raises ArgumentError if there is no folder with a model, or its description is damaged.
    """
    path = Path(path)
    for kind in KINDS:
        folder = kind.find(path)
        if folder is not None:
            return kind.open(folder)
    raise ArgumentError(
        "no model is here",
        found=f"{path}, {'a folder without one' if files.is_folder(path) else 'no folder'}",
        expected="the output folder of a training, one of its checkpoints, or a folder of Hugging Face",
        remedy="name the --out folder of a training that ended; its weights are written at the end",
    )


def open_on_all(comm: Communicator, path: str) -> ModelFolder:
    """Return on every rank the model that rank 0 finds at `path`, seen from its working folder; collective.

    Raises, on every rank, what `open_model` raises.
    """
    group, absolute = group_of(comm), shared_path(comm, path)
    found: ModelFolder | None = None
    with group.raise_together("opening the model"):
        if comm.rank == 0:
            found = open_model(absolute)
    return group.broadcast("opening the model", found)


# -- The tokenizer that lies in a model folder, whoever wrote the folder ----------------------------------------------


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """Open the tokenizer in a folder, None if there is none. Raises DataError or BackendError."""
    return open_tokenizer(folder) if (folder / NAME).exists() else None


# -- Where an answer ends, as the files beside a model say it; the same for a folder of Hugging Face and for weights


GENERATION = "generation_config.json"


def ends_in(folder: Path, config: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """Return the ids of `eos_token_id`, one or several, of those below `vocab`; none if nobody says it.

    generation_config.json in the folder says it, or else `config`, the model's own description.

    Raises ConfigError if that file cannot be read.
    """
    path = folder / GENERATION
    facts = read_json(path, "copy the folder again, or leave that file out") if path.exists() else config
    found = facts.get("eos_token_id")
    several = found if isinstance(found, list) else [found]
    return tuple(each for each in several if type(each) is int and 0 <= each < vocab)
