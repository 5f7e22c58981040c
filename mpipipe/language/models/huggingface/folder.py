"""A folder with a model, as the library `transformers` leaves one, opened for reading.

config.json has the architecture; model.safetensors the tensors, or model.safetensors.index.json
names the file of each. Opening compares their names with those that the model has. No tensor is
read, and pickled objects (.bin, .pt) never.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpipipe import files
from mpipipe.checkpoint import TensorFile, open_tensors
from mpipipe.errors import ArgumentError, ConfigError, NonFiniteError
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.huggingface import families
from mpipipe.language.models.huggingface.families import FAMILIES, Family, read_config
from mpipipe.language.models.huggingface.names import parts_of
from mpipipe.language.models.huggingface.options import CONFIG, read_json
from mpipipe.options import Values
from mpipipe.text import counted

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")
COPY_AGAIN = "copy or download the folder again, from where it is whole"
NOT_THESE = (
    "take the folder of a model with this architecture, or the weights that belong to "
    "this config.json"
)


@dataclass(frozen=True)
class Folder:
    """A model in a folder: plain data, which can be sent to other ranks.

    Attributes
    ----------
    path, config : Path and dict
        The folder, and what its config.json says.
    model : GPT
        The description that follows from it.
    places : dict
        (file, name there) of each tensor, by its name in the table of the family.
    """

    path: Path
    config: Values
    model: GPT
    places: Mapping[str, tuple[str, str]]

    @property
    def family(self) -> Family:
        """The family of the model."""
        return FAMILIES[self.config["model_type"]]


def open_folder(path: str | Path) -> Folder:
    """Open a folder: read its config.json and the names in its files of tensors, but no tensor.

    Raises ConfigError for an option of config.json that is not supported, and ArgumentError for a
    file or tensor that is missing, damaged or unknown.
    """
    folder = Path(path)
    config = read_json(
        folder / CONFIG, "a model folder has a config.json beside its tensors; " + COPY_AGAIN
    )
    family, fields = read_config(config, folder / CONFIG)
    try:
        model = GPT(**fields)
    except ArgumentError as error:
        raise ConfigError(
            f"the sizes of a model folder do not fit together: {error.message}",
            found=f"{error.found} in {folder / CONFIG}",
            expected=error.expected,
        ) from error
    stored = _stored(folder)
    return Folder(folder, config, model, _known(family, model, stored, folder))


def _stored(folder: Path) -> dict[str, str]:
    """Return {name of a tensor: the file that has it}, from the index or from the one file."""
    if (folder / INDEX).exists():
        return _indexed(folder)
    if (folder / SINGLE).exists():
        with opened(folder / SINGLE) as file:
            return dict.fromkeys(file.arrays, SINGLE)
    problem = f"neither {SINGLE} nor {INDEX} in {folder}"
    remedy = COPY_AGAIN
    pickled = []
    for name in PICKLES:
        if (folder / name).exists():
            pickled.append(name)
    if pickled:
        problem = f"{', '.join(pickled)} in {folder}: pickled objects, which run code when read"
        remedy = (
            "let the library that wrote it save it again as safetensors: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ArgumentError(
        "the model folder has no tensors that can be read",
        found=problem,
        expected=f"{SINGLE}, or {INDEX} with its files",
        remedy=remedy,
    )


def _indexed(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    places = read_json(path, COPY_AGAIN).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConfigError(
            f"{INDEX} of a model folder has no weight_map", found=str(path), remedy=COPY_AGAIN
        )
    for name, file in places.items():
        plain = isinstance(file, str) and Path(file).name == file
        if not plain or not file.endswith(".safetensors"):
            raise ConfigError(
                f"{INDEX} of a model folder names a file that cannot be one of its own",
                found=f"{name} in {file!r:.100}, in {path}",
                expected="the name of a file .safetensors in the same folder, without a path",
                remedy=COPY_AGAIN,
            )
    return places


def _known(
    family: Family, model: GPT, stored: dict[str, str], folder: Path
) -> dict[str, tuple[str, str]]:
    """Find the tensors of the model among those that are stored."""
    left = dict(stored)
    # Files of the decoder without a head leave out the prefix.
    if any(name.startswith(family.prefix) for name in stored):
        prefix = ""
    else:
        prefix = family.prefix
    known = {}
    layers = f"{family.architecture} with {counted(model.layers, 'layer')}"
    for part in parts_of(family.table, model):
        name = part.theirs.removeprefix(prefix)
        if name not in left:
            raise ArgumentError(
                f"the model folder has no tensor {name}",
                found=f"{len(stored)} others in {folder}",
                expected=f"all tensors of {layers}",
                remedy=NOT_THESE,
            )
        known[part.theirs] = (left.pop(name), name)
    others = sorted(name for name in left if not name.endswith(family.buffers))
    if others:
        raise ArgumentError(
            f"the model folder has a tensor {others[0]} that the model has not",
            found=f"{len(others)} such tensors, the first in {folder / left[others[0]]}",
            expected=f"those of {layers} alone",
            remedy=NOT_THESE,
        )
    return known


def opened(path: Path) -> AbstractContextManager[TensorFile]:
    """Open a file of tensors; errors within become ArgumentError with its name."""
    return open_tensors(path, "a file of the model folder", "the safetensors format", COPY_AGAIN)


def count_not_finite(values: np.ndarray) -> int:
    """Count the values that are NaN or infinite."""
    return values.size - int(np.count_nonzero(np.isfinite(values)))


def check_finite(values: np.ndarray, what: str, place: Path, remedy: str) -> None:
    """Raise NonFiniteError unless all values are finite; `place` has them, or is to get them."""
    count = count_not_finite(values)
    if count:
        raise NonFiniteError(
            f"{what} is not finite",
            found=f"{count} of {values.size} values are NaN or infinite in {place}",
            expected="finite numbers",
            remedy=remedy,
        )


# -- Where a model comes from, and what goes along when it is written
#
# That are the tokenizer's files, and the options of config.json that change nothing in what the
# model computes. A folder of weights of this package keeps that config.json as
# huggingface_config.json, so that it can be written again.


KEPT_CONFIG = "huggingface_config.json"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class Origin:
    """A folder that a model comes from; plain data, which can be sent to other ranks.

    Attributes
    ----------
    path : Path or None
        The folder; None for a model that was made here.
    config : dict
        Its config.json, or the one that it keeps; {} where there is none.
    """

    path: Path | None = None
    config: Values = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Origin:
        """Look into a folder, of Hugging Face or of this package."""
        for name in (CONFIG, KEPT_CONFIG):
            if (path / name).exists():
                remedy = "remove it, if the model was not made from a model folder"
                return cls(path, read_json(path / name, remedy))
        return cls(path)

    @property
    def family(self) -> Family | None:
        """The family of the model there."""
        return FAMILIES.get(str(self.config.get("model_type")))

    @property
    def carried(self) -> Values:
        """The options that are written again as they were."""
        return {name: self.config[name] for name in families.CARRIED if name in self.config}

    def copy(self, target: Path, keep_config: bool = False) -> None:
        """Copy the files of the tokenizer, and settings of generation, into a folder.

        To keep config.json is to copy it too, under a name of its own. Raises OSError.
        """
        if self.path is None:
            return
        copies = {name: name for name in COMPANIONS}
        if keep_config and self.config:
            copies |= {KEPT_CONFIG: KEPT_CONFIG, CONFIG: KEPT_CONFIG}
        for name, copy in copies.items():
            if (self.path / name).exists():
                files.check_regular(self.path / name)
                shutil.copyfile(self.path / name, target / copy)
