"""Sequences that hold several documents: attention does not cross from one into the next.

    window of a row     ...a a a|b b b b b b|c c...      segments 0 0 0 1 1 1 1 1 1 2 2

Every rank of a pipeline has attention layers, so every rank needs the segments of the batch under way. They follow
from the positions of its windows, and these from (seed, step): no message brings them. The trainer hands a batch to
`Packing` before each call of the pipeline. In a forward, the layer says which micro-batch it is of (`Attend.begin`),
and that micro-batch's rows of the segments are used, also where the forward is run again for its backward. A backward
uses what its forward has saved. So it does not matter in which order a schedule mixes micro-batches.

Positions go on through the row, they do not begin anew with each document: rotary positions act by distances alone, and
within a document these are the same. Learned positions would differ, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpipipe.arrays import Array
from mpipipe.attention import Local, Ring
from mpipipe.errors import ArgumentError
from mpipipe.even_split import even_split
from mpipipe.nn import Attend, Position


class Packing:
    """The segments of the batch under way, in a call of the pipeline with so many micro-batches."""

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

    def __init__(self, inner: Local | Ring, packing: Packing) -> None:
        self.inner, self.packing = inner, packing
        self._microbatch = 0
        self._others: dict[int, PackedAttend] = {}

    def begin(self, position: Position) -> None:
        self._microbatch = position.microbatch

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """As `Attend.forward`."""
        return self.inner.forward(q, k, v, segments=self.packing.of(self._microbatch))

    def backward(self, dout: Array, saved: Any) -> tuple[Array, Array, Array]:
        """As `Attend.backward`."""
        return self.inner.backward(dout, saved)

    def backward_into(self, dout: Array, saved: Any, room: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """As `Attend.backward_into`."""
        return self.inner.backward_into(dout, saved, room)

    def with_window(self, window: int) -> PackedAttend:
        if window not in self._others:
            self._others[window] = PackedAttend(self.inner.with_window(window), self.packing)
        return self._others[window]

    @property
    def poll(self) -> Callable[[], object]:
        """That of `inner`."""
        return self.inner.poll

    @poll.setter
    def poll(self, poll: Callable[[], object]) -> None:
        self.inner.poll = poll
