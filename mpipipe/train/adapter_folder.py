"""A folder with an adapter of PEFT, as a model: the one that it was made for, with the adapter merged into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpipipe import nn
from mpipipe.checkpoint.whole_folder import standing
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ConfigError
from mpipipe.models import GPT, huggingface
from mpipipe.models.huggingface.adapter import CONFIG, AdapterFolder, is_adapter_folder, open_adapter
from mpipipe.models.huggingface.families import Family, expressed
from mpipipe.models.huggingface.merging import merge_adapter
from mpipipe.models.huggingface.options import read_json
from mpipipe.train.data.tokenizer import Tokenizer
from mpipipe.train.huggingface_folder import HuggingFaceFolder
from mpipipe.train.trained_folder import CheckpointFolder, WeightsFolder

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
        name = read_json(folder / CONFIG, "").get(BASE)
        for kind in BASES if type(name) is str else ():
            found = kind.find(Path(folder, str(name)))
            if found is not None:
                return cls(adapter, kind.open(found))
        raise ConfigError(
            "the model that an adapter was made for is not there",
            found=f"{BASE} = {name!r} in {folder / CONFIG}",
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
        with group_of(mesh.comm).together("merging the adapter"):
            own = {name: array for stage in stages for name, array in stage.parameters.items()}
            merge_adapter(self.adapter, self.family, self.model, own)
            for stage in stages:
                stage.renew_compute()

    @property
    def ends(self) -> tuple[int, ...]:
        """As of the model."""
        return self.base.ends

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the model, None for one of bytes."""
        return self.base.tokenizer()
