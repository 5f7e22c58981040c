"""The ranks on which a training is measured, and their share of it."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import numpy as np

from mpipipe import nn
from mpipipe.comm.binding import oversubscribed, own_cores
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.errors import ConfigError
from mpipipe.train.architecture import Architecture
from mpipipe.train.config import TrainConfig
from mpipipe.train.fine_tuning import FineTuning
from mpipipe.train.packing import Packing
from mpipipe.train.planner.subject import Subject
from mpipipe.train.shard import Shard


@dataclass(frozen=True)
class Scene(Subject):
    """A training that is to be planned, and this rank's place in it.

    Parameters
    ----------
    mesh : the ranks
    shard : the share of sequences that this rank has
    """

    mesh: Mesh
    shard: Shard

    @classmethod
    def of(
        cls, config: TrainConfig, architecture: Architecture, mesh: Mesh, vocab: int, tuning: FineTuning | None = None
    ) -> Scene:
        """Make a scene with its shard; collective over all ranks. Raises the same error on every rank."""
        with group_of(mesh.comm).together("plan: the shards of sequences"):
            packing = Packing(1) if config.packing == "segments" else None
            shard = Shard(mesh.seq, config.layout, config.seq_len, packing)
        return cls(
            config, architecture, vocab, tuning or FineTuning(), mesh.pipe.size, mesh.data.size, mesh=mesh, shard=shard
        )

    def tokens(self, rows: int, microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw inputs and targets, this rank's share of them. Documents, where they count, are as long as sequences."""
        shape = (2, rows, self.config.seq_len)
        inputs, targets = np.random.default_rng(0).integers(0, self.vocab, size=shape)
        if self.shard.packing is not None:
            self.shard.packing.microbatches = microbatches
            self.shard.packing.begin(np.zeros(shape[1:], np.int64))
        return self.shard.cut(inputs), self.shard.cut(targets)

    def message_shape(self, rows: int) -> tuple[int, int, int]:
        """Return the shape of what a stage hands to the next for a micro-batch."""
        length = self.shard.layout.length(self.shard.rank)
        return rows, length, getattr(self.model, "dim", self.config.dim)

    def layers(self) -> list[nn.Layer]:
        """Make the layers of the model."""
        return self.tuning.layers(self.model.build(self.shard.attend, self.shard.positions))

    def check_place(self, place: str) -> None:
        """Refuse a GPU, on which the host's clock says nothing of a layer."""
        if place != "cpu":
            raise ConfigError(
                "a plan is made on the CPU only",
                found=f"device {place}",
                remedy="choose schedule, chunks and microbatches by hand, with --device cpu make a plan of the CPU's",
            )

    def oversubscribed(self) -> str:
        """Say which ranks share cores, "" where none do; collective."""
        comm = self.mesh.comm
        mine = {"rank": comm.rank, "host": socket.gethostname(), "cores": own_cores()}
        found = oversubscribed(group_of(comm).gather("plan: the cores", mine))
        return f"{found}: times depend on who waits meanwhile, and predictions are rough" if found else ""
