"""The part of every sequence that one rank has: its attention, its positions, and the loss after its last stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpipipe import nn
from mpipipe.arrays import Array
from mpipipe.attention import Layout, Local, Ring
from mpipipe.errors import ConfigError
from mpipipe.job.types import Communicator
from mpipipe.language.packing import PackedAttend, Packing
from mpipipe.nn.loss import worth_tiles
from mpipipe.text import counted


class Shard:
    """The share of one rank of `comm` in sequences of `seq_len` positions; making one is collective.

    Parameters
    ----------
    comm : the ranks that share a sequence; a single one has it all
    layout : "zigzag", "contiguous" or "striped"
    packing : has the documents of each batch; None if attention goes across them

    Attributes
    ----------
    attend : for nn.SelfAttention
    positions : for nn.SelfAttention; None for 0 ... seq_len - 1

    Raises ConfigError if a rank would have no position.
    """

    def __init__(self, comm: Communicator, layout: str, seq_len: int, packing: Packing | None = None) -> None:
        self.layout, self.rank = Layout(layout, comm.size, seq_len), comm.rank
        if min(self.layout.length(rank) for rank in range(comm.size)) == 0:
            raise ConfigError(
                "a rank would hold no part of the sequence",
                found=f"seq_len {seq_len} on {counted(comm.size, 'rank')}, {layout}",
                expected="at least one position a rank, two for zigzag",
                remedy="raise seq_len, or lower seq",
            )
        self.ring = Ring(comm, causal=True, layout=self.layout) if comm.size > 1 else None
        whole = Local(causal=True) if self.ring is None else self.ring
        self.packing = packing
        self.attend: Local | Ring | PackedAttend = whole if packing is None else PackedAttend(whole, packing)
        self.positions = None if self.ring is None else self.layout.positions(self.rank)

    def cut(self, array: np.ndarray) -> np.ndarray:
        """Return this rank's columns of an array (rows, seq_len)."""
        return array if self.ring is None else self.layout.shard(array, self.rank)

    def loss_for(self, stage: nn.Stage, sequences: int) -> Callable[..., tuple[Any, Array | None]]:
        """Return the loss after a stage: with its head, in tiles, where logits of all `sequences` are large."""
        if worth_tiles(stage, sequences * self.layout.length(self.rank)):
            return nn.HeadCrossEntropy(stage)
        return nn.softmax_cross_entropy
