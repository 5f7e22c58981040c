"""A task: layers of a model, a loss and batches, and texts and files of their training.

The loop, the run folder, checkpoints, resume and plans are written for a `Task`, whatever its
samples are.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mpipipe import checkpoint, nn, optim
from mpipipe.comm import Mesh
from mpipipe.errors import ConfigError
from mpipipe.even_split import even_split
from mpipipe.job import Communicator, RankGroup
from mpipipe.options import Values
from mpipipe.pipeline import Pipeline
from mpipipe.planning import LayerPlan, count_once, declared
from mpipipe.text import counted
from mpipipe.train.shard import Shard

Described: TypeAlias = "Mapping[str, nn.Parameter]"
Layers: TypeAlias = "list[Any]"
Named: TypeAlias = "Mapping[str, float]"
Numbers: TypeAlias = "Sequence[float]"
# Inputs and targets; what `Task.begin` takes may follow.
Pair: TypeAlias = "tuple[Any, Any]"
Loss: TypeAlias = "Callable[..., Any]"
Shape: TypeAlias = "tuple[int, ...]"
Stages: TypeAlias = "Sequence[nn.Stage]"


@dataclass(frozen=True)
class TaskSource:
    """The file that a task was loaded from, as it was then, and the modules that it imports."""

    path: Path
    name: str
    content: bytes
    # From its own folder, by their paths in there.
    modules: Mapping[str, bytes]

    @property
    def copies(self) -> dict[str, bytes]:
        """What a run folder has copies of, by name in there."""
        return {self.path.name: self.content, **self.modules}

    @property
    def checksum(self) -> str:
        """SHA-256 of the file, and of its modules if it has some."""
        total = hashlib.sha256(self.content)
        for name, content in sorted(self.modules.items()):
            total.update(f"\n{name} {hashlib.sha256(content).hexdigest()}".encode())
        return total.hexdigest()


class Task:
    """A task has `layers`, `loss`, `batch` and `validation`; all else has a default.

    Every rank has one object, and calls the same methods in the same order, unless a method says
    otherwise. An error in one of them ends the training on all ranks.

    Attributes
    ----------
    layout : str
        Which positions of a sample a rank of `seq` holds: "contiguous", "zigzag" or "striped".
    unit, units : str, int
        What the samples are counted in, and how many of these one sample has.
    per_second : str
        What metrics call the number of these in a second.
    freeze : sequence of str
        Patterns of names of parameters that stay as they are, as for `nn.Stage`.
    groups : sequence of optim.Group
        Parameters with a learning rate or a weight decay of their own.
    read_ahead : bool
        Whether a thread reads the batch of the next step while the layers of this one compute. A
        task that sets it promises that `batch` uses nothing that its layers, its loss or its
        optimizer use. No other method of the task runs meanwhile, and nothing is drawn from the
        generators of PyTorch.
    per_microbatch : bool
        Whether `batch` and `validation` are called once for the rows of each micro-batch. What they
        return then may have any shapes, such as those of graphs with their nodes and edges; the
        first array has a row at least.
    everywhere : bool
        Whether `batch` and `validation` are called on the ranks of middle stages, too.
    folders, copies : tuple of str, bool
        Folders in the run folder that `save` replaces. Whether `sample` copies the model.
    outline, pipe, file : list of Layer, int, TaskSource
        The layers on paper and the ranks of a pipeline, set before anything that asks for them; and
        the file that the task was loaded from.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> from mpipipe.job import inprocess
    >>> from mpipipe.train import Task, TaskConfig, run
    >>> class Shift(Task):
    ...     def layers(self, shard):
    ...         return [nn.Linear(4, 16), nn.Gelu(), nn.Linear(16, 4)]
    ...     def loss(self, output, target):
    ...         return nn.mean_squared_error(output, target)
    ...     def batch(self, step, rows, shard):
    ...         fields = np.random.default_rng(step).normal(size=(64, 4)).astype(np.float32)[rows]
    ...         return fields, np.roll(fields, 1, axis=1)
    ...     def validation(self, index, rows, shard):
    ...         return self.batch(10_000 + index, rows, shard)
    >>> config = TaskConfig(batch=8, steps=20, device="cpu", out=tempfile.mkdtemp())
    >>> inprocess.run(2, lambda comm: run(Shift(), config, comm))[0].step  # doctest: +ELLIPSIS
    mpipipe: 2 ranks = pipe 2 x data 1 x seq 1; one_f_one_b, 2 stages, 8 micro-batches
    ...
    20
    """

    layout = "contiguous"
    unit = "samples"
    units = 1
    per_second = "samples_per_second"
    freeze: Sequence[str] = ()
    groups: Sequence[optim.Group] = ()
    read_ahead = False
    per_microbatch = False
    everywhere = False
    folders: tuple[str, ...] = ("weights",)
    copies = False
    outline: Sequence[nn.Layer] = ()
    pipe = 1
    file: TaskSource | None = None

    # -- what a task of your own has

    def layers(self, shard: Shard) -> Layers:
        """Make the whole model, in order; collective over `shard.comm`.

        The list is of layers, of modules of PyTorch, of pairs (function of JAX, parameters), and of
        functions without arguments that make one of these. What a function makes is made on the
        ranks that need it alone.
        """
        raise NotImplementedError("every task has one of its own")

    def loss(self, output: Any, target: Any) -> Pair:
        """Return the loss of a micro-batch and its gradient, or be an attribute: a loss of `nn`.

        A loss of `adapters` will do, too. (value, doutput) are a mean over the micro-batch, and its
        gradient, shaped as the output of the last layer. A third value is its weight: how many
        things it is a mean over. Without it a micro-batch counts by the entries of its target.
        """
        raise NotImplementedError("every task has one of its own")

    def batch(self, step: int, rows: range, shard: Shard) -> Pair:
        """Return inputs and targets of these rows of the batch of a step. The arrays are copied.

        The main thread calls it, in the order of the steps; with `read_ahead` a thread does, one
        step ahead.

        Parameters
        ----------
        step : int
            Number of the step, from 0. The batch depends on it alone, or a resumed training has
            other batches.
        rows : range
            Indices of the rows that are wanted, in the whole batch: any number of them, also one.
        shard : Shard
            This rank's share of each row.

        Returns
        -------
        inputs, targets : array, or tuple or dict of arrays
            On the host, with len(rows) rows, or of any shapes with `per_microbatch`.
        """
        raise NotImplementedError("every task has one of its own")

    def validation(self, index: int, rows: range, shard: Shard) -> Pair:
        """Return the same of a batch of the validation.

        Parameters
        ----------
        index, rows, shard : int, range, Shard
            Number of the batch, from 0; the others as for `batch`.
        """
        raise NotImplementedError("every task has one of its own")

    # -- what it may have

    def metrics(self, output: Any, target: Any) -> Named:
        """Return means over a micro-batch of the validation, of numpy arrays, by name."""
        return {}

    def show(self, output: Any, target: Any, shard: Shard) -> str:
        """Show the output of the trained model for some rows of the validation, as lines.

        Parameters
        ----------
        output, target, shard : arrays or trees, Shard
            Of that micro-batch, as numpy arrays, on the ranks of the last stage of the first
            replica, so that they can put the `whole` together. The lines of the first of them
            count.
        """
        return ""

    def optimizer(self, stages: Stages, config: Any) -> Any:
        """Return an optimizer of the stages of this rank; None for the one that options name.

        It has `stages`, `steps`, `lr`, `step(lr, scale)`, `named_state()` and `before_write`, as
        `optim.AdamW`, and steps with the `lr` that it is called with, which is that of `rate_at`.
        """
        return None

    def rate_at(self, step: int, config: Any) -> float:
        """Return the learning rate of a step, from 0, the same on all ranks."""
        return optim.warmup_cosine(step, config.steps, config.lr, min(config.warmup, config.steps))

    def costs(self) -> Numbers:
        """Return the operations of each layer, in any unit, by which stages are cut."""
        return [1.0] * len(self.outline)

    def slice_lengths(self, length: int, slices: int) -> Sequence[int]:
        """Cut a sequence into slices, which should take equal times; by default they are even.

        Returns
        -------
        sequence of int
            Their lengths, the same on all ranks.
        """
        return list(map(len, even_split(length, slices)))

    # -- how the room asks: the model, on paper

    def find_data(self, group: RankGroup) -> None:
        """Find out what the data are, without opening them; collective."""

    def shard(self, comm: Communicator, size: int) -> Shard:
        """Make this rank's share of each sample; on paper `comm` is one of `size` ranks."""
        return Shard(comm, self.layout, size)

    def trained(self) -> Described:
        """Return the parameters that are trained, by name.

        Raises ConfigError if there are none, or a pattern of `freeze` or of `groups` fits no name.
        """
        everything = declared(self.outline)
        entries = everything.items()
        names = [name for name, parameter in entries if not parameter.frozen]
        unfit = []
        for pattern in self.freeze:
            if not fnmatch.filter(names, pattern.removeprefix("!")):
                unfit.append(("freeze", pattern))
        for group in self.groups:
            if not any(group._has(entry.tie or name, entry.shape) for name, entry in entries):
                unfit.append(("groups", f"{group.match}"))
        for what, pattern in unfit:
            raise ConfigError(
                f"a pattern of {what} fits no parameter",
                found=pattern,
                expected=f"one that fits names such as {', '.join(names[:4])}",
                remedy="docs/finetuning.md has those of a GPT; a * in a pattern fits anything",
            )
        frozen = nn.frozen_names(everything, tuple(self.freeze))
        if frozen and len(frozen) == len(everything):
            raise ConfigError("nothing is left to train", found=f"freeze {' '.join(self.freeze)}")
        return {name: parameter for name, parameter in entries if name not in frozen}

    def check_stages(self, stages: int) -> None:
        """Raise ConfigError if the model cannot be cut into this number of stages."""
        count = len(self.outline)
        if count < stages:
            raise ConfigError(
                "the model has too few pieces for so many stages",
                found=f"{counted(count, 'piece')} and cannot fill {counted(stages, 'stage')}",
                expected="at least one piece for each stage",
                remedy="use fewer ranks or chunks, or more layers; --pipe sets the ranks of a "
                "pipeline, and the others train replicas",
            )

    def sample_bytes(self, rows: int, dtype: str) -> Shape:
        """Return bytes of a sample, and of the message of a layer for these rows; 0 if unknown."""
        return 0, 0

    def check(self, plan: LayerPlan, mesh: Mesh) -> None:
        """Raise an error where the training could not come to its end; all ranks do the same."""

    # -- data

    def open_data(self, plan: LayerPlan, mesh: Mesh) -> None:
        """Open the data on the ranks that read them; collective."""

    def example(self, rows: int, microbatches: int, shard: Shard) -> Pair:
        """Return inputs and targets as they may come, for measurements.

        Parameters
        ----------
        rows, microbatches, shard : int, int, Shard
            Rows of all micro-batches, how many there are, and this rank's share.
        """
        raise NotImplementedError  # `batch` gives them

    def begin(self, more: Any) -> None:
        """Take what came with inputs and targets, before the call that it is for."""

    @property
    def fingerprint(self) -> str:
        """What tells task and data from others, over a resume."""
        if self.file is None:
            return ""
        return self.file.checksum

    # -- the model, on this rank

    def loss_for(self, stage: nn.Stage, rows: int, shard: Shard) -> Loss | None:
        """Return the loss after a stage, as `Pipeline` takes it; None for `loss`.

        Parameters
        ----------
        stage, rows, shard : Stage, int, Shard
            The last stage, rows of a micro-batch, and this rank's share.
        """
        return None

    @property
    def alike(self) -> bool:
        """Whether the inputs of all layers have one shape."""
        return False

    def load(self, stages: Stages, mesh: Mesh) -> None:
        """Set the parameters of a new training, where they were not drawn; collective."""

    # -- what is said and written

    def sizes(self) -> Values:
        """Return what the model is, as plain values by name: the same as in a checkpoint."""
        return {}

    def resolve(self, keys: Values) -> Values:
        """Return the options of a training with those of the task, and with absolute paths."""
        return keys

    @property
    def handed_over(self) -> str | None:
        """The fingerprint of data that no option names."""
        return None

    def description(self, place: str) -> str:
        """Return what is trained, in a line; `place` is what computes: CPUs or GPUs."""
        return f"{type(self).__name__}: {self.parameters_in_words()} on {place}"

    def parameters_in_words(self) -> str:
        """Return how many parameters there are, and how many are trained if not all of them."""
        everything = declared(self.outline)
        count = count_once(everything)
        trained = count_once(self.trained())
        if trained == count:
            return f"{count:,} parameters"
        return f"{count:,} parameters of which {trained:,} are trained"

    def beginning(self) -> str:
        """Return where the weights come from at the begin; "" where they are drawn."""
        return ""

    def derived(self, loss: float | None, validation: float | None) -> Values:
        """Return further fields of a record, from the losses."""
        return {}

    def save(self, out: Path, plan: LayerPlan, stages: Stages, mesh: Mesh, step: int) -> None:
        """Write the model at the end; collective.

        Parameters
        ----------
        out, plan, stages, mesh, step : Path, LayerPlan, sequence of Stage, Mesh, int
            The output folder, the cut of the model, the stages of this rank, all ranks, and the
            steps that were made.
        """
        checkpoint.save(
            out / "weights",
            mesh,
            stages,
            step=step,
            state={"fingerprint": self.fingerprint},
            keep=1,
        )

    def state_name(self, name: str) -> str:
        """Return what a parameter is called in the file that `mpipipe convert` writes."""
        return name

    def sample(self, plan: LayerPlan, pipeline: Pipeline, mesh: Mesh, shard: Shard) -> str:
        """Return a sample of the trained model as text, in place of what `show` returns.

        Parameters
        ----------
        plan, pipeline, mesh, shard : LayerPlan, Pipeline, Mesh, Shard
            As they were in the training. The text of rank 0 counts.
        """
        return ""
