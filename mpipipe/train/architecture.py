"""What a training asks of a model: sizes from which layers are made, and their costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeAlias

from mpipipe import nn
from mpipipe.arrays import Array


class Model(Protocol):
    """The sizes of a model, a dataclass such as `models.GPT`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def seq(self) -> int:
        """Length of the sequences."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""

    def build(self, attend: Any, positions: Array | None = None) -> list[nn.Layer]:
        """Make the layers, whose attention is `attend`: such as attention.Local, or a function that makes one."""

    def costs(self) -> list[float]:
        """Relative cost of each layer."""


# Makes a model from the sizes in a configuration, as the class `models.GPT` does: called with seq, dim, layers, heads,
# kv_heads, hidden, tied, dropout and rope_base by name, and with vocab where the data are not bytes. None is the
# architecture's own choice.
Architecture: TypeAlias = Callable[..., Model]
