"""What of a model a training trains: all of it, what no pattern freezes (--freeze), or low-rank adapters (--lora)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, cast

from mpipipe import nn
from mpipipe.arrays import Array
from mpipipe.attention import Local
from mpipipe.checkpoint import standing_folder
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job import Communicator, group_of
from mpipipe.language.models import huggingface
from mpipipe.language.models.gpt import GPT, declared_in
from mpipipe.language.models.huggingface.adapter import (
    AdapterFolder,
    adapter_parts,
    is_adapter_folder,
    open_adapter,
    read_adapter,
    save_adapter,
)
from mpipipe.language.models.huggingface.families import expressed
from mpipipe.language.options import ModelOptions
from mpipipe.nn import Parameter, announce_write, frozen_names, is_adapter, is_frozen
from mpipipe.train import shared_path

INSIDE = "adapter"  # the folder in which a training leaves its adapters
FORM = "rank,alpha,target,target,... such as 8,16,q_proj,v_proj, or the folder of an adapter"


@dataclass(frozen=True)
class FineTuning:
    """What is trained.

    freeze : patterns of names of parameters that stay as they are, as for nn.Stage
    lora : adapters, besides which everything is frozen; None without
    start : the adapters to begin with; None for new ones
    """

    freeze: tuple[str, ...] = ()
    lora: nn.LoRA | None = None
    start: AdapterFolder | None = None

    def layers(self, layers: Sequence[nn.Layer]) -> list[nn.Layer]:
        """Return the layers of a model, with adapters where there are to be any."""
        return list(layers) if self.lora is None else self.lora.apply(layers)

    def declared(self, model: Model) -> dict[str, Parameter]:
        """Return all parameters of a model by name, adapters included."""
        return declared_in(self.layers(model.build(Local())))

    def trained(self, model: Model) -> dict[str, Parameter]:
        """Return the parameters that are trained.

        Raises ConfigError if nothing is, and for a pattern that fits no parameter; ArgumentError for a target that
        no layer has, and a tied parameter that is frozen in some of its places only.
        """
        declared = self.declared(model)
        names = [name for name in declared if self.lora is None or is_adapter(name)]  # all else is frozen anyway
        for pattern in self.freeze:
            if not any(is_frozen(name, [pattern.removeprefix("!")]) for name in names):
                raise ConfigError(
                    "a pattern of freeze fits no parameter" + ("" if self.lora is None else " of an adapter"),
                    found=pattern,
                    expected=f"one that fits names such as {', '.join(names[:4])}",
                    remedy="docs/finetuning.md has the names",
                )
        frozen = frozen_names(declared, self.freeze)
        if len(frozen) == len(declared):
            raise ConfigError("nothing is left to train", found=f"freeze {' '.join(self.freeze)}")
        return {name: parameter for name, parameter in declared.items() if name not in frozen}

    def costs(self, model: Model) -> list[float]:
        """Return the costs of a model's layers, for the cut into stages.

        A layer that is trained costs its forward and two products as large; one that is not, or that has adapters, one
        of these; and one below everything that is trained its forward alone.
        """
        trained = self.trained(model)
        whole = layers_of(name for name in trained if not is_adapter(name))
        lowest = min(layers_of(trained))
        products = [3 if place in whole else 1 if place < lowest else 2 for place, _ in enumerate(model.costs())]
        return [cost if count == 3 else cost * count / 3 for cost, count in zip(model.costs(), products)]

    def frozen_stages(self, model: Model, layer_ranges: Sequence[tuple[int, int]]) -> set[int]:
        """Return the logical stages in which nothing is trained; raises what `trained` does."""
        layers = layers_of(self.trained(model))
        return {stage for stage, cut in enumerate(layer_ranges) if not layers.intersection(range(*cut))}

    def check(self, model: Model, origin: huggingface.Origin) -> None:
        """Raise ConfigError, before a training begins, where its adapters could not be written."""
        if self.lora is not None:
            family, _ = expressed(cast(GPT, model), origin.family)
            adapter_parts(self.lora, family, cast(GPT, model))

    def load(self, stages: Sequence[nn.Stage], model: Model, origin: huggingface.Origin, mesh: Mesh) -> None:
        """Set the adapters of this rank to those to begin with, if there are any; collective.

        Raises ArgumentError or NonFiniteError, on every rank, with the names of file and tensor.
        """
        if self.start is None:
            return
        with group_of(mesh.comm).raise_together("loading the adapter"):
            family, _ = expressed(cast(GPT, model), origin.family)
            announce_write(*stages)
            own = {name: array for stage in stages for name, array in stage.parameters.items()}
            read_adapter(self.start, family, cast(GPT, model), own)
            for stage in stages:
                stage.sync_compute()

    def save(self, out: Path, stages: Sequence[nn.Stage], model: Model, origin: huggingface.Origin, mesh: Mesh) -> None:
        """Leave the adapters in the output folder of a training, if there are any; collective.

        Raises NonFiniteError or StorageError, on every rank.
        """
        if self.lora is not None:
            own = {name: array for stage in stages for name, array in stage.parameters.items()}
            save_adapter(out / INSIDE, self.lora, cast(GPT, model), own, mesh, origin)


def layers_of(names: Iterable[str]) -> set[int]:
    """Return the places in the model of the layers of these parameters."""
    return {int(name.partition(".")[0]) for name in names}


def find_tuning(config: ModelOptions, comm: Communicator) -> FineTuning:
    """Return what a configuration trains; collective, since an adapter to begin with is read by rank 0.

    Raises ConfigError or ArgumentError on every rank.
    """
    freeze, text = config.freeze, config.lora
    if text is None:
        return FineTuning(freeze)
    group, found = group_of(comm), None
    path = shared_path(comm, text)
    with group.raise_together("train: the adapters"):
        if comm.rank == 0:
            folder = standing_folder(Path(path))
            if is_adapter_folder(folder):
                start = open_adapter(folder)
                found = FineTuning(freeze, start.lora, start)
            else:
                found = FineTuning(freeze, parse_lora(text))
    tuning: FineTuning = group.broadcast("train: the adapters", found)
    return tuning


def parse_lora(text: str) -> nn.LoRA:
    """Return the adapters that `--lora` asks for. Raises ConfigError."""
    rank, _, rest = text.partition(",")
    alpha, _, targets = rest.partition(",")
    try:
        return nn.LoRA(int(rank), float(alpha), [name.strip() for name in targets.split(",") if name.strip()])
    except (ValueError, ArgumentError) as error:
        raise ConfigError("lora is neither adapters nor the folder of one", found=text, expected=FORM) from error


# -- What a training asks of a model: sizes from which layers are made, and their costs -------------------------------


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
