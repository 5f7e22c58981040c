"""The part of every sequence that one rank has: its attention, its positions, and the loss after its last stage.

Sequences may hold several documents; with `Packing`, attention does not cross from one into the next. Every rank needs
the segments of the batch under way; they follow from (seed, step), so no message brings them. In a forward, the layer
says which micro-batch it is of (`Attend.begin`), also where the forward is run again for its backward; a backward uses
what its forward has saved. So it does not matter in which order a schedule mixes micro-batches.

Positions go on through the row: rotary positions act by distances alone, and within a document these are the same.
Learned positions would differ, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpipipe import nn
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.even_split import even_split
from mpipipe.job import Communicator
from mpipipe.nn import Attend, Position, worth_tiles
from mpipipe.train import Shard


class TextShard(Shard):
    """The share of one rank in sequences of `seq_len` positions; making one is collective.

    `attend` and `positions` are for nn.SelfAttention; with `packing` attention stays within the documents of each
    batch. Raises ConfigError if a rank would have no position.
    """

    def __init__(
        self, comm: Communicator, layout: str, seq_len: int, packing: Packing | None = None, size: int | None = None
    ) -> None:
        super().__init__(comm, layout, size)
        self.layout, self.packing = self.divide(seq_len), packing
        whole = super().attend(seq_len, causal=True)
        self.attention: Attend = whole if packing is None else PackedAttend(whole, packing)

    @property
    def rotary(self) -> np.ndarray | None:
        """The positions of this rank; None where it has all of them."""
        return None if self.comm.size == 1 else self.layout.positions(self.rank)

    def loss_for(self, stage: nn.Stage, sequences: int) -> Callable[..., tuple[Any, Array | None]]:
        """Return the loss after a stage: with its head, in tiles, where the logits of all `sequences` are large."""
        if worth_tiles(stage, sequences * self.layout.length(self.rank)):
            return nn.HeadCrossEntropy(stage)
        return nn.softmax_cross_entropy


class Packing:
    """The segments of the batch under way, in a call of the pipeline with `microbatches` micro-batches."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self._parts: list[np.ndarray] = []

    def begin(self, segments: np.ndarray) -> None:
        """Take the segments of this replica's rows, integers (rows, seq_len), before a call of the pipeline."""
        self._parts = [segments[part.start : part.stop] for part in even_split(len(segments), self.microbatches)]

    def of(self, microbatch: int) -> np.ndarray:
        """Return the segments of a micro-batch. Raises ArgumentError if no batch was begun."""
        if microbatch >= len(self._parts):
            raise ArgumentError(
                "the documents of a micro-batch are not known",
                found=f"micro-batch {microbatch}",
                expected=f"one of {len(self._parts)}",
                remedy="call Packing.begin before each call of the pipeline",
            )
        return self._parts[microbatch]


class PackedAttend(Attend):
    """Attention of `inner` within documents, for nn.SelfAttention; `packing` has the segments."""

    def __init__(self, inner: Any, packing: Packing) -> None:
        self.inner, self.packing = inner, packing
        self._microbatch = 0
        self._others: dict[int, PackedAttend] = {}

    def begin(self, position: Position) -> None:
        self._microbatch = position.microbatch

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        found: tuple[Array, Any] = self.inner.forward(q, k, v, segments=self.packing.of(self._microbatch))
        return found

    def backward(self, dout: Array, saved: Any) -> tuple[Array, Array, Array]:
        return self.inner.backward(dout, saved)

    def backward_into(self, dout: Array, saved: Any, room: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        return self.inner.backward_into(dout, saved, room)

    def with_window(self, window: int) -> PackedAttend:
        if window not in self._others:
            self._others[window] = PackedAttend(self.inner.with_window(window), self.packing)
        return self._others[window]

    @property
    def poll(self) -> Callable[[], object]:
        poll: Callable[[], object] = self.inner.poll
        return poll

    @poll.setter
    def poll(self, poll: Callable[[], object]) -> None:
        self.inner.poll = poll
