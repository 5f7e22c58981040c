"""The folders that a training leaves, as models: its weights, and its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpipipe import checkpoint, files, nn
from mpipipe.checkpoint import folders, manifest, tensors
from mpipipe.checkpoint.contents import PARAMETERS
from mpipipe.checkpoint.whole_folder import check_same, identity, standing
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.models import GPT, huggingface
from mpipipe.nn.lora import is_adapter
from mpipipe.train import weights
from mpipipe.train.answer_ends import ends_in
from mpipipe.train.data.tokenizer import Tokenizer
from mpipipe.train.folder_tokenizer import tokenizer_in


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
        with group.together("loading the weights"):
            weights.load(self.path, stages, casts=True)
        with group.together("loading the weights: whether they are of one model"):
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
        return path if files.exists(path / manifest.MANIFEST) else folders.newest(path)

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
        names = {stored: dtype for dtype, stored in tensors.DTYPES.items()}
        return cls(folder, sizes, names[kept[0].dtype])

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
