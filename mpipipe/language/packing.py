"""Attention within documents, where a sequence holds several.

Every rank needs the segments of the batch under way; they follow from (seed, step), so no message
brings them. In a forward, the layer says which micro-batch it is of (`Attend.begin`), also where
the forward is run again for its backward; a backward uses what its forward has saved. So it does
not matter in which order a schedule mixes micro-batches.

Positions go on through the row: rotary positions act by distances alone, and within a document
these are the same. Learned positions would differ, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpipipe.arrays import Array
from mpipipe.even_split import even_split
from mpipipe.nn import Attend, Position, Saved


class Packing:
    """The segments of the batch under way, for each of `microbatches` micro-batches."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.parts: list[np.ndarray] = []

    def begin(self, segments: np.ndarray) -> None:
        """Take the segments of this replica's rows, integers (rows, seq_len)."""
        places = even_split(len(segments), self.microbatches)
        self.parts = [segments[place.start : place.stop] for place in places]


class PackedAttend(Attend):
    """Attention of `inner` within documents, for nn.SelfAttention; `packing` has the segments."""

    def __init__(self, inner: Any, packing: Packing) -> None:
        self.inner = inner
        self.packing = packing
        self._microbatch = 0

    def begin(self, position: Position) -> None:
        self._microbatch = position.microbatch // len(self.slice_rows or (1,))
        self.inner.begin(position)

    def positions(self, rows: int) -> np.ndarray | None:
        return self.inner.positions(rows)

    def for_layer(self) -> PackedAttend:
        return PackedAttend(self.inner.for_layer(), self.packing)

    @property
    def slice_rows(self) -> Sequence[int] | None:  # type: ignore[override]
        return self.inner.slice_rows

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Saved]:
        return self.inner.forward(q, k, v, segments=self.packing.parts[self._microbatch])

    def backward(
        self, dout: Array, saved: Saved, room: tuple[Array, Array, Array] | None = None
    ) -> tuple[Array, Array, Array]:
        return self.inner.backward(dout, saved, room)

    def with_window(self, window: int) -> PackedAttend:
        return PackedAttend(self.inner.with_window(window), self.packing)

    @property
    def poll(self) -> Callable[[], object]:
        return self.inner.poll

    @poll.setter
    def poll(self, poll: Callable[[], object]) -> None:
        self.inner.poll = poll
