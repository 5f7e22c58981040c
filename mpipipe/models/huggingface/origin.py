"""Where a model comes from: what belongs to a model folder besides the parameters goes along when the model is written.

These are the tokenizer's files, and the options of config.json that change nothing in what the model computes. A folder
of weights of this package keeps that config.json as huggingface_config.json, so that it can be written again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpipipe import files
from mpipipe.models.huggingface import without_effect
from mpipipe.models.huggingface.families import FAMILIES, Family
from mpipipe.models.huggingface.options import CONFIG, read_json

KEPT_CONFIG = "huggingface_config.json"
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


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
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Origin:
        """Look into a folder, of Hugging Face or of this package.

        Parameters
        ----------
        path : Path
            The folder.

        Returns
        -------
        Origin
            With the config.json there, if there is one.

        Raises
        ------
        ConfigError
            A config.json that is none.
        """
        for name in (CONFIG, KEPT_CONFIG):
            if (path / name).exists():
                return cls(path, read_json(path / name, "remove it, if the model was not made from a model folder"))
        return cls(path)

    @property
    def family(self) -> Family | None:
        """The family of the model there."""
        return FAMILIES.get(str(self.config.get("model_type")))

    @property
    def carried(self) -> dict[str, Any]:
        """The options that are written again as they were."""
        return {name: self.config[name] for name in without_effect.CARRIED if name in self.config}

    def copy(self, target: Path, keep_config: bool = False) -> None:
        """Copy what belongs to the model into a folder: the files of its tokenizer, and settings of generation.

        Parameters
        ----------
        target : Path
            The folder.
        keep_config : bool
            Whether config.json is copied too, under a name of its own.

        Raises
        ------
        OSError
            A file cannot be read or written.
        """
        if self.path is None:
            return
        for name in COMPANIONS:
            if (self.path / name).exists():
                files.check_regular(self.path / name)
                shutil.copyfile(self.path / name, target / name)
        if keep_config and self.config:
            source = next(self.path / name for name in (CONFIG, KEPT_CONFIG) if (self.path / name).exists())
            shutil.copyfile(source, target / KEPT_CONFIG)
