"""A folder of Hugging Face, as one of the kinds of model folders that are opened; see model_folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpipipe import files, nn
from mpipipe.checkpoint.whole_folder import check_same, identity, standing
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.models import GPT, huggingface
from mpipipe.models.huggingface.folder import INDEX, PICKLES, SINGLE
from mpipipe.models.huggingface.options import CONFIG
from mpipipe.nn.writing import announce_write
from mpipipe.train.answer_ends import ends_in
from mpipipe.train.data.tokenizer import Tokenizer
from mpipipe.train.folder_tokenizer import tokenizer_in

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
        with group.together("loading the model folder"):
            announce_write(*stages)
            huggingface.read(self.folder, {name: array for each in stages for name, array in each.parameters.items()})
            for stage in stages:
                stage.renew_compute()
        with group.together("loading the model folder: whether it is one model"):
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
