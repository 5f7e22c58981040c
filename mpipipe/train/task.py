"""What a training trains: the layers of a model, a loss, batches, and what is said and written of them.

The loop, the run folder, checkpoints, resume and plans are written for a `Task`, whatever its samples are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mpipipe import nn
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, RankGroup
from mpipipe.nn import Parameter, frozen_names
from mpipipe.pipeline import Pipeline
from mpipipe.planning import LayerPlan, declared, parameters_of
from mpipipe.text import counted

Pair: TypeAlias = "tuple[np.ndarray, np.ndarray]"  # inputs and targets


class Task:
    """What is trained; every rank has one object. A training calls the methods in the order in which they stand here.

    unit : what the samples are counted in
    units : of them in one sample
    freeze : patterns of names of parameters that stay as they are
    folders : in the output folder, which the task replaces at the end
    everywhere : whether `batch` and `validation` are called on the ranks of middle stages, too
    copies : whether the model is copied at the end, for a sample
    """

    unit = "samples"
    units = 1
    freeze: Sequence[str] = ()
    folders: tuple[str, ...] = ()
    everywhere = False
    copies = False

    # -- the model, on paper ------------------------------------------------------------------------------------

    def find_data(self, group: RankGroup) -> None:
        """Find out what the data are, without opening them; collective."""

    def layers(self, shard: Any) -> list[nn.Layer]:
        """Make the whole model, in order, for a rank with this share of each sample; None: for one that has all."""
        raise NotImplementedError

    def costs(self) -> Sequence[float]:
        """Return the operations of each layer, in any unit."""
        return [1.0] * len(self.layers(None))

    def trained(self) -> Mapping[str, Parameter]:
        """Return the parameters that are trained, by name."""
        everything = declared(self.layers(None))
        frozen = frozen_names(everything, self.freeze)
        return {name: parameter for name, parameter in everything.items() if name not in frozen}

    def check_stages(self, stages: int) -> None:
        """Raise ConfigError if the model cannot be cut into this number of stages."""
        count = len(self.costs())
        if count < stages:
            raise too_few_pieces(f"{count} pieces", stages, "use fewer ranks or chunks")

    def planning_facts(self) -> dict[str, Any]:
        """Return what measured times hold for, besides the layers and the options of the mesh."""
        return {}

    def sample_bytes(self, rows: int, dtype: str) -> tuple[int, int]:
        """Return bytes of inputs and targets of a sample, and of what a layer hands to the next for these rows.

        A training is refused where what it surely needs exceeds the memory; 0 is what is not known.
        """
        return 0, 0

    def check(self, plan: LayerPlan, mesh: Mesh) -> None:
        """Raise an error where the training could not come to its end; all ranks do the same."""

    # -- data ---------------------------------------------------------------------------------------------------

    def open_data(self, plan: LayerPlan, mesh: Mesh) -> None:
        """Open the data on the ranks that read them; collective."""

    def shard(self, comm: Communicator, microbatches: int) -> Any:
        """Return this rank's share of each sample, which the ranks of `comm` share; collective."""
        return None

    def example(self, rows: int, microbatches: int, shard: Any) -> Pair:
        """Return inputs and targets as they may come, for measurements."""
        return self.batch(0, range(rows), shard)

    def batch(self, step: int, rows: range, shard: Any) -> Pair:
        """Return inputs and targets of these rows of the batch of a step."""
        raise NotImplementedError

    def validation(self, index: int, rows: range, shard: Any) -> Pair:
        """Return the same of a batch of the validation."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """What tells the data from others."""
        return ""

    # -- the model, on this rank --------------------------------------------------------------------------------

    def loss(self, output: Any, target: Any, factor: float = 1.0) -> tuple[Any, Any]:
        """Return the loss of a micro-batch, and the gradient of its output times `factor`."""
        raise NotImplementedError

    def loss_for(self, stage: nn.Stage, rows: int, shard: Any) -> Callable[..., Any]:
        """Return the loss after a stage, for micro-batches of this number of rows."""
        return self.loss

    def message_shape(self, rows: int, shard: Any) -> tuple[int, ...]:
        """Return the shape of what a stage hands to the next for these rows, for measurements."""
        return (rows,)

    def load(self, stages: Sequence[nn.Stage], mesh: Mesh) -> None:
        """Set the parameters with which a new training begins, where they are not those that were drawn; collective."""

    # -- what is said and written -------------------------------------------------------------------------------

    def sizes(self) -> dict[str, Any]:
        """Return what the model is, as plain values by name, for checkpoints."""
        return {}

    def compared(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """Return what of such sizes must be the same in a training and in the checkpoint that it continues from."""
        return sizes

    def unfinished(self, out: Path) -> set[str]:
        """Return names of what a training leaves in its output folder that ended while it wrote them."""
        return set()

    def resolve(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a training with those of the task filled in, and its paths absolute."""
        return keys

    @property
    def handed_over(self) -> str | None:
        """The fingerprint of data that no option names."""
        return None

    def description(self, place: str) -> str:
        """Return what is trained, in a line; `place` is what computes: CPUs or GPUs."""
        return f"{parameters_of(self.layers(None)):,} parameters on {place}"

    def beginning(self) -> str:
        """Return where the weights come from with which the training begins; "" where they are drawn."""
        return ""

    def metrics(self, loss: float | None, validation: float | None) -> dict[str, Any]:
        """Return further numbers of a record, by the names of its fields."""
        return {}

    def summary(self, record: Mapping[str, float]) -> str:
        """Return what the last line says besides, from the facts of the last record."""
        return ""

    def save(self, out: Path, plan: LayerPlan, stages: Sequence[nn.Stage], mesh: Mesh) -> None:
        """Write the model at the end; collective."""

    def sample(self, plan: LayerPlan, pipeline: Pipeline, mesh: Mesh, shard: Any) -> str:
        """Return what the trained model makes, as text to show; collective."""
        return ""


def too_few_pieces(pieces: str, stages: int, remedy: str) -> ConfigError:
    """Make the error for a model that cannot be cut into this number of stages."""
    return ConfigError(
        "the model has too few pieces for so many stages",
        found=f"{pieces} and cannot fill {counted(stages, 'stage')}",
        expected="at least one piece for each stage",
        remedy=remedy,
    )
