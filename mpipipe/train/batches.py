"""The batches of a training on this rank: its replica's rows, and its share of each sequence."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from mpipipe.comm.mesh import Mesh
from mpipipe.train.config import TrainConfig
from mpipipe.train.data import Source, Tokens
from mpipipe.train.data.windows import read_windows, segments, training_starts, validation_starts
from mpipipe.train.shard import Shard
from mpipipe.train.training_plan import TrainingPlan

Share: TypeAlias = "tuple[np.ndarray | None, np.ndarray | None]"  # inputs and targets, None if they do not belong


class Batches:
    """Draws batches; every rank that needs one draws it by itself.

    Parameters
    ----------
    config : of the training
    mesh, plan, shard : where this rank stands
    data : on the ranks of the first and the last stage, on all with `config.packing` "segments"; None elsewhere

    Attributes
    ----------
    first, last : whether this rank has inputs, and targets
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, plan: TrainingPlan, shard: Shard, data: Source | None) -> None:
        self.config, self.shard, self.data = config, shard, data
        self.first = mesh.pipe.rank == plan.schedule.placement[0]
        self.last = mesh.pipe.rank == plan.schedule.placement[-1]
        self.rows = slice(mesh.data.rank * plan.rows, (mesh.data.rank + 1) * plan.rows)  # of a batch, for this replica

    def training(self, step: int) -> Share:
        """Return inputs for the first stage and targets for the last, of a step."""
        if self.data is None:
            return None, None
        config, text = self.config, self.data.train
        starts = training_starts(
            len(text), seed=config.seed, step=step, batch=config.batch, rows=self.rows, seq_len=config.seq_len,
            order=config.order,
        )  # fmt: skip
        return self._share(text, starts)

    def validation(self, index: int) -> Share:
        """Return the same of a batch of the validation, which has always the same ones."""
        if self.data is None:
            return None, None
        config, text = self.config, self.data.validation
        starts = validation_starts(
            len(text), index=index, batches=config.eval_batches, batch=config.batch, rows=self.rows,
            seq_len=config.seq_len,
        )  # fmt: skip
        return self._share(text, starts)

    def _share(self, text: Tokens, starts: list[int]) -> Share:
        seq_len, cut = self.config.seq_len, self.shard.cut
        if self.shard.packing is not None:
            self.shard.packing.begin(segments(text, starts, seq_len))
        if not (self.first or self.last):
            return None, None
        inputs, targets = read_windows(text, starts, seq_len)
        return cut(inputs) if self.first else None, cut(targets) if self.last else None
