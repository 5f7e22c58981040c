"""The configuration of the training of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mpipipe.errors import ConfigError
from mpipipe.language.options import OTHER_NAMES, DataOptions, ModelOptions
from mpipipe.options import document
from mpipipe.train import TaskConfig

# what a folder says, with `from`
FROM_FOLDER = ("vocab", "dim", "layers", "heads", "kv_heads", "hidden", "tied", "rope_base")


@dataclass(frozen=True)
class TrainConfig(TaskConfig, ModelOptions, DataOptions):
    """The configuration of one training of a language model.

    Field names are the keys of a TOML file and, with dashes, the flags of `mpipipe train`. Every field has a default.
    Texts with a meaning of their own, such as a partition, may be given as texts.

    Raises
    ------
    ConfigError
        For a value of the wrong type or out of its range.

    Examples
    --------
    >>> from mpipipe.train import TrainConfig
    >>> config = TrainConfig(steps=100, pipe=2, schedule="interleaved_1f1b", chunks=2)
    >>> config.lr
    0.003
    """

    other_names: ClassVar[Mapping[str, str]] = {**TaskConfig.other_names, **OTHER_NAMES}

    def __post_init__(self) -> None:
        super().__post_init__()

        if self.from_ is not None and self.init is not None:
            raise ConfigError(
                "from and init are both given",
                found=f"from {self.from_}, init {self.init}",
                expected="one of them: a folder that a training begins from has weights",
            )
        if self.save_dtype is not None and self.save_as == "mpipipe":
            raise ConfigError(
                "save_dtype without save_as = huggingface",
                found=f"save_dtype {self.save_dtype}",
                expected="none: mpipipe saves parameters as they are",
            )
        if self.resume not in ("auto", "no") and self.init is not None:
            raise ConfigError(
                "resume and init are both given",
                found=f"resume {self.resume}, init {self.init}",
                expected="one of them: a checkpoint that is resumed has weights",
            )

    @classmethod
    def _check_given(cls, values: dict[str, Any]) -> None:
        sizes = [name for name in FROM_FOLDER if name in values]
        if values.get("from_") is not None and sizes:
            raise ConfigError(
                f"{sizes[0]} and from are both given",
                found=f"{sizes[0]} = {values[sizes[0]]}, from {values['from_']}",
                expected="one of them: the architecture comes from the folder",
                remedy=f"leave out {' and '.join(sizes)}",
            )


document(TrainConfig)
