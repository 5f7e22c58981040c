"""What a training trains (--freeze, --lora), and the model it begins from (--from)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpipipe import files, nn
from mpipipe.checkpoint import standing_folder
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job import Communicator, group_of
from mpipipe.language.config import FROM_FOLDER, ModelOptions, TrainConfig
from mpipipe.language.models import huggingface
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.huggingface import adapter
from mpipipe.language.models.huggingface.families import expressed
from mpipipe.language.models.model_folder import ModelFolder, open_on_all
from mpipipe.language.models.weights import own_arrays
from mpipipe.nn import announce_write, is_adapter
from mpipipe.planning import layers_with
from mpipipe.train import shared_path

INSIDE = "adapter"  # the folder in which a training leaves its adapters
FORM = "rank,alpha,target,target,... such as 8,16,q_proj,v_proj, or the folder of an adapter"


@dataclass(frozen=True)
class FineTuning:
    """What is trained: not `freeze`, and with `lora` adapters alone, which begin as `start`."""

    freeze: tuple[str, ...] = ()
    lora: nn.LoRA | None = None
    start: adapter.AdapterFolder | None = None

    def layers(self, layers: Sequence[nn.Layer]) -> list[nn.Layer]:
        """Return the layers of a model, with adapters where there are to be any."""
        if self.lora is None:
            return list(layers)
        return self.lora.apply(layers)

    def costs(self, model: GPT, trained: Iterable[str]) -> list[float]:
        """Return the costs of a model's layers, where only `trained` parameters are trained.

        A layer that is trained costs its forward and two products as large; one that is not, or
        that has adapters, one of these; and one below everything that is trained its forward alone.
        """
        names = list(trained)
        whole = layers_with(name for name in names if not is_adapter(name))
        lowest = min(layers_with(names))
        costs = []
        for place, cost in enumerate(model.costs()):
            if place in whole:
                costs.append(cost)
            elif place < lowest:
                costs.append(cost / 3)
            else:
                costs.append(cost * 2 / 3)
        return costs

    def check(self, model: GPT, origin: huggingface.Origin) -> None:
        """Raise ConfigError, before a training begins, where its adapters could not be written."""
        if self.lora is not None:
            adapter.adapter_parts(self.lora, expressed(model, origin.family)[0], model)

    def load(
        self, stages: Sequence[nn.Stage], model: GPT, origin: huggingface.Origin, mesh: Mesh
    ) -> None:
        """Set the adapters of this rank to those to begin with, if there are any; collective."""
        if self.start is None:
            return
        with group_of(mesh.comm).raise_together("loading the adapter"):
            family, _ = expressed(model, origin.family)
            announce_write(*stages)
            adapter.read_adapter(self.start, family, model, own_arrays(stages))
            for stage in stages:
                stage.sync_compute()


def find_tuning(config: ModelOptions, comm: Communicator) -> FineTuning:
    """Return what a configuration trains; collective, since rank 0 reads an adapter."""
    freeze = config.freeze
    text = config.lora
    if text is None:
        return FineTuning(freeze)
    folder = Path(shared_path(comm, text))

    def find() -> FineTuning:
        place = standing_folder(folder)
        if not files.exists(place / adapter.ADAPTER_CONFIG):
            return FineTuning(freeze, parse_lora(text))
        start = adapter.open_adapter(place)
        return FineTuning(freeze, start.lora, start)

    return group_of(comm).from_one("train: the adapters", find)


def parse_lora(text: str) -> nn.LoRA:
    """Return the adapters that `--lora` asks for. Raises ConfigError."""
    rank, _, rest = text.partition(",")
    alpha, _, targets = rest.partition(",")
    try:
        return nn.LoRA(int(rank), float(alpha), targets.replace(",", " ").split())
    except (ValueError, ArgumentError) as error:
        raise ConfigError(
            "lora is neither adapters nor the folder of one", found=text, expected=FORM
        ) from error


# -- The model that a training begins from (--from) ------------------------------------------------


def find_pretrained(config: TrainConfig, comm: Communicator) -> tuple[TrainConfig, ModelFolder]:
    """Open the folder to begin from, and return the configuration with its sizes; collective."""
    folder = open_on_all(comm, str(config.from_))
    sizes = {}
    with group_of(comm).raise_together("train: the model to begin from"):
        for name in FROM_FOLDER:
            value = getattr(config, name)
            sizes[name] = getattr(folder.model, name)
            if value not in (getattr(type(config), name), sizes[name]):
                raise ConfigError(
                    f"{name} contradicts the model to begin from",
                    found=f"{name} = {value}",
                    expected=f"{sizes[name]}, as in {folder.path}",
                    remedy=f"leave out {name}: the architecture comes from the folder",
                )
    return replace(config, **sizes), folder
