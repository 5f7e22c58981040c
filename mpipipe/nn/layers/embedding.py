"""What a language model begins and ends with: token embedding, learned positions, and the head."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.errors import ArgumentError
from mpipipe.even_split import even_split
from mpipipe.nn.checks import check_positive, check_sequence, check_slice_count, checked_ids
from mpipipe.nn.layers.attend import ForwardAndBackward, as_attend, why_unrecordable
from mpipipe.nn.layers.layer import Layer, Pending, Projection, Saved, WithPending, WithSaved
from mpipipe.nn.layers.linear import Linear
from mpipipe.nn.parameters import matrix, row_slices


class Embedding(Layer):
    """Row x of a (vocab, dim) table for each integer x: (...) to (..., dim).

    Integers on the host are checked before they are uploaded to a stage on a GPU. Nothing waits for
    integers that come from the GPU: there an id outside the table gives a row of NaN.

    Parameters
    ----------
    vocab, dim : int
        Sizes of the table, the parameter `weight`.
    tie : str, optional
        Key of `Parameter.tie`. A `Linear(dim, vocab, bias=False)` with the same key is the matching
        head.
    gain : float
        The table starts normal with standard deviation gain / sqrt(dim), as the weight of that
        Linear does.
    scale : float
        Factor on the rows that come out.
    slices : int
        Number of parameters that make up the table: `weight` alone, or `weight_0`, `weight_1`, ...,
        each tied with the `HeadSlice` of its number. They start as the whole table does.
    """

    uploads_integers = True
    recordable = True
    mixes_positions = False

    weight: Array

    def __init__(
        self,
        vocab: int,
        dim: int,
        tie: str | None = None,
        gain: float = 1.0,
        scale: float = 1.0,
        slices: int = 1,
    ):
        check_positive(vocab=vocab, dim=dim, slices=slices)
        check_slice_count(slices, vocab)
        self.vocab = vocab
        self.dim = dim
        self.scale = scale
        whole = matrix(vocab, dim, gain, tie)
        self.declared = {"weight": whole}
        self.starts: dict[str, int] = {}
        if slices > 1:
            for number, part in enumerate(even_split(vocab, slices)):
                self.starts[f"weight_{number}"] = part.start
            self.declared = dict(zip(self.starts, row_slices(whole, slices)))

    def unrecordable(self) -> str:
        if self.starts:
            return "the host looks which slice has each row"
        return ""

    def forward(self, x: Array) -> WithSaved:
        kernels = self.stage.kernels
        if self.starts:
            y, x = self._of_slices(x)
        else:
            x = self.upload(x)
            y = kernels.embed(self.weight, x)
        if self.scale != 1:
            y = kernels.scale(y, self.scale, out=y)
        return y, x

    def upload(self, x: Array) -> Array:
        if self.starts:
            device = "cpu"
        else:
            device = self.stage.device
        return checked_ids(x, self.vocab, f"layer {self.name} (Embedding): the input", device)

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        return None, (dy, saved)

    def backward_weight(self, pending: Pending) -> None:
        dy, x = pending
        kernels = self.stage.kernels
        if self.scale != 1:
            dy = kernels.scale(dy, self.scale)
        if not self.starts:
            self._add("weight", kernels.embed_backward, dy, x)
            return
        order, parts = x
        dy = kernels.embed(dy.reshape(-1, self.dim), order)
        start = 0
        for name, ids in zip(self.starts, parts):
            self._add(name, kernels.embed_backward, dy[start : start + len(ids)], ids)
            start += len(ids)

    def _of_slices(self, x: Array) -> WithSaved:
        """Return rows (..., dim), and for the backward their order and the ids in each slice."""
        kernels = self.stage.kernels
        device = self.stage.device
        ids = self.upload(arrays.download(x)).reshape(-1).astype(np.int64)
        starts = [*self.starts.values(), self.vocab]
        order = np.argsort(ids, kind="stable")
        ends = np.searchsorted(ids[order], starts)
        parts = []
        for start, first, last in zip(starts, ends, ends[1:]):
            parts.append(ids[order[first:last]] - start)
        back = np.argsort(order)
        if device == "cuda":
            order, back, *parts = map(arrays.upload, (order, back, *parts))
        by_slice = arrays.empty((len(ids), self.dim), self.stage.dtype, device)
        for name, part, first, last in zip(self.starts, parts, ends, ends[1:]):
            kernels.copy(kernels.embed(getattr(self, name), part), by_slice[first:last])
        return kernels.embed(by_slice, back).reshape(*x.shape, self.dim), (order, parts)


NUMBERS = 64  # arrays of row numbers that a layer keeps at most, each for its own positions


class LearnedPositions(Layer):
    """y = x + a row of a table for each position, for x (batch, seq, dim).

    Parameters
    ----------
    count, dim : int
        Number of positions, and size of the last axis of x and y: the parameter `weight` is (count,
        dim).
    attend : object, optional
        What other layers attend with, if that knows positions as attention.KVCache does:
        `attend.positions(seq)` is asked in each forward, and `attend.advance(seq)` is called after
        it.
    positions : 1-D integers, optional
        The position of each place in the whole sequence; `attend` is not asked then. By default 0
        ... seq - 1.
    gain : float
        The table starts normal with standard deviation gain / sqrt(dim).
    """

    takes_integers = False
    recordable = True
    mixes_positions = True

    weight: Array

    def __init__(
        self,
        count: int,
        dim: int,
        attend: ForwardAndBackward | None = None,
        positions: ArrayLike | None = None,
        gain: float = 1.0,
    ):
        check_positive(count=count, dim=dim)
        self.count = count
        self.dim = dim
        self.attend = attend
        self.positions = None
        if positions is not None:
            self.positions = np.asarray(positions)
            if attend is not None:
                as_attend(attend).check_positions(self.positions)
        self.mixes_positions = attend is None or as_attend(attend).slice_rows is None
        self.declared = {"weight": matrix(count, dim, gain)}

    def unrecordable(self) -> str:
        if self.attend is None or self.positions is not None:
            return ""
        return why_unrecordable(self.attend)

    def bound(self) -> None:
        self._attend = None
        if self.attend is not None and self.positions is None:
            self._attend = as_attend(self.attend).for_layer()
        self._numbers = lru_cache(maxsize=NUMBERS)(self._made)

    def forward(self, x: Array) -> WithSaved:
        check_sequence(self, x, self.dim, self.positions)
        batch, seq = x.shape[:2]
        positions = self.positions
        if self._attend is not None:
            self._attend.begin(self.stage.position)
            positions = self._attend.positions(seq)
        if positions is None:
            positions = np.arange(seq)
        numbers = self._numbers(batch, np.asarray(positions, np.int64).tobytes())
        numbers = arrays.keep_for_graph(numbers)
        if self._attend is not None:
            self._attend.advance(seq)
        kernels = self.stage.kernels
        return kernels.add(x, kernels.embed(self.weight, numbers)), numbers

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        return dy, (dy, saved)

    def backward_weight(self, pending: Pending) -> None:
        self._add("weight", self.stage.kernels.embed_backward, *pending)

    def _made(self, batch: int, positions: bytes) -> Array:
        """Make the numbers (batch, seq) of positions in int64 bytes."""
        numbers = np.frombuffer(positions, np.int64)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.count):
            raise ArgumentError(
                f"layer {self.name} (LearnedPositions): a position has no row in the table",
                found=f"positions {numbers.min()} ... {numbers.max()}",
                expected=f"0 ... {self.count - 1}",
                remedy="take shorter sequences, or a model with more max_positions",
            )
        whole = np.ascontiguousarray(np.broadcast_to(numbers, (batch, numbers.size)))
        return self.upload(whole)


class Head(Linear):
    """Logits = x W^T over the last axis of x: a `Linear` whose product a loss can make itself.

    It is the last layer of a model. A `HeadCrossEntropy` that was made for its stage takes over the
    product in the calls of a pipeline that have a loss: there the layer passes x on as it is, and
    the gradient of x comes back. Everywhere else it gives logits.

    Parameters
    ----------
    inputs, outputs : int
        Width of the model and size of the vocabulary. The parameter `weight` is (outputs, inputs).
    tie, gain : str or None, float
        As for `Linear`.
    """

    recordable = True
    mixes_positions = False

    def __init__(self, inputs: int, outputs: int, tie: str | None = None, gain: float = 1.0):
        super().__init__(inputs, outputs, bias=False, tie=tie, gain=gain)

    def projections(self) -> dict[str, Projection]:
        return {}  # a loss may make the product

    def forward(self, x: Array) -> WithSaved:
        if self.stage.names.headless:
            return (x, None)
        return super().forward(x)

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        if saved is None:
            return (dy, None)
        return super().backward_input(dy, saved)

    def backward_weight(self, pending: Pending) -> None:
        if pending is not None:
            super().backward_weight(pending)
