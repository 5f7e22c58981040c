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

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mpipipe import files, nn
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.comm.types import Communicator
from mpipipe.errors import ArgumentError
from mpipipe.models import GPT
from mpipipe.train.adapter_folder import AdaptedFolder
from mpipipe.train.huggingface_folder import HuggingFaceFolder
from mpipipe.train.output_folder import shared_path
from mpipipe.train.trained_folder import CheckpointFolder, WeightsFolder


class Tokenizer(Protocol):
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

    def tokenizer(self) -> Tokenizer | None:
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
    with group.together("opening the model"):
        if comm.rank == 0:
            found = open_model(absolute)
    return group.broadcast("opening the model", found)
