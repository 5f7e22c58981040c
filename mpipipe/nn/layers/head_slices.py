"""The head and its loss in slices of the vocabulary, as layers that stages divide.

    labels  ---------.-------------------.-------------------.
                     v                   v                   v
    h --> norm --> slice 0 -- h, L, t -> slice 1 -- h, L, t -> slice 2 --> L - t, the loss of each
    position

L is the log-sum-exp of the logits so far, L_after = log(exp(L_before) + sum_v exp(l_v)), and t the
logit of the label once its slice has come. With the gradients dL and dt of what a slice hands on,

    dl_v = dL exp(l_v - L_after) + dt [v is the label]
    dL_before = dL exp(L_before - L_after)
    dt_before = dt

The gradient of h is the sum of those of all slices, which comes together on the way back. Messages
carry two numbers a position besides h. No slice knows the L of all when it computes its logits. So
where these are too large to be kept, the backward computes them again: four products, or five in a
split backward, in place of three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Tree
from mpipipe.errors import ArgumentError
from mpipipe.even_split import even_split
from mpipipe.nn.checks import check_features, check_positive, check_slice_count, checked_ids, rows
from mpipipe.nn.layers.layer import Layer, Pending, Saved, WithPending, leaf
from mpipipe.nn.parameters import matrix, row_slices

if TYPE_CHECKING:
    from mpipipe.nn.stage import Stage

LABELS = "labels"  # their name among the inputs
TILE_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # logits of one tile
# Slices keep their logits up to so many bytes for a micro-batch.
KEPT_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}


def tile_rows(vocab: int, itemsize: int, device: str) -> int:
    """Return how many rows of logits make a tile of about `TILE_BYTES`; see nn/loss.py."""
    return max(1, TILE_BYTES[device] // (vocab * itemsize))


def tiles(stage: Stage, count: int, step: int) -> Iterator[slice]:
    """Yield `step` of `count` rows at a time; between them messages advance."""
    for start in range(0, count, step):
        if start and stage.poll is not None:
            stage.poll()
        yield slice(start, min(start + step, count))


class HeadSlice(Layer):
    """Slice `number` of a head that is cut into `of` slices of the vocabulary, one after the other.

    Without labels it gives logits: the first slice takes h (..., inputs), each but the last one
    gives (h, its logits after those of the slices before), and the last one all logits (...,
    vocab). With labels, integers (...) that the inputs have under the name "labels"
    (mpipipe.Branches), it never holds more logits than its own: each slice but the last one gives
    (h, L, t), and the last one the losses L - t (...), in nats, for `nn.mean_of_losses`. L is the
    log-sum-exp of the logits so far, t the logit of the label; both have the dtype of parameters.

    Parameters
    ----------
    inputs, vocab : int
        Width of the model, and size of the whole vocabulary. The parameter `weight` is (its rows,
        inputs).
    number, of : int
        Which slice it is, from 0, and how many there are. Their sizes differ by one row at most.
    tie : str, optional
        As for `Head`; the `Embedding` with this key has as many slices.
    gain : float
        As for `Head`.
    labels : bool
        Whether it takes labels.
    stream : str, optional
        Name of the parameter of the whole head, with whose initial values the slices start where
        there is no tie.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import Branches, nn
    >>> stage = nn.Stage([nn.HeadSlice(8, 50, number, 3, labels=True) for number in range(3)])
    >>> h, labels = np.ones((2, 6, 8), np.float32), np.arange(12).reshape(2, 6)
    >>> losses, saved = stage.forward(Branches(h, labels=labels))
    >>> losses.shape, nn.mean_of_losses(losses, labels)[1].shape
    ((2, 6), (2, 6))
    """

    takes_integers = False
    mixes_positions = False

    weight: Array

    def __init__(
        self,
        inputs: int,
        vocab: int,
        number: int,
        of: int,
        tie: str | None = None,
        gain: float = 1.0,
        labels: bool = False,
        stream: str | None = None,
    ):
        check_positive(inputs=inputs, vocab=vocab, of=of)
        check_slice_count(of, vocab)
        if not 0 <= number < of:
            raise ArgumentError(
                "number of a slice of the head", found=repr(number), expected=f"0 ... {of - 1}"
            )
        self.inputs = inputs
        self.vocab = vocab
        self.number = number
        self.of = of
        self.first = even_split(vocab, of)[number].start
        self.last = number == of - 1
        self.declared = {"weight": row_slices(matrix(vocab, inputs, gain, tie), of, stream)[number]}
        self.takes = ()
        if labels:
            self.takes = (LABELS,)

    def forward(self, x: Tree) -> tuple[Tree, Saved]:
        if isinstance(x, tuple):
            parts = x
        else:
            parts = (x,)
        carried = self.number
        if self.takes:
            carried = 2 * min(carried, 1)
        if len(parts) != 1 + carried:
            raise ArgumentError(
                f"layer {self.name} (HeadSlice): slice {self.number} of {self.of} does not take "
                "what comes to it",
                found=f"{len(parts)} arrays",
                expected=f"{1 + carried}, as the slice before gives",
                remedy="put all slices of a head after one another, with labels or without",
            )
        check_features(self, parts[0], self.inputs)
        if self.takes:
            return self._losses(*parts)
        return self._logits(*parts)

    def backward_input(self, dy: Array, saved: Saved) -> WithPending:
        dx = self._back(dy, saved, True, False)
        if not self.last:
            dy = (None, *dy[1:])
        return dx, (dy, saved)

    def backward_weight(self, pending: Pending) -> None:
        dy, saved = pending
        self._back(dy, saved, False, True)

    def backward(self, dy: Array, saved: Saved) -> Array:
        return self._back(dy, saved, True, True)

    # -- logits

    def _logits(self, h: Array, *before: Array) -> tuple[Tree, Saved]:
        flat = rows(h)
        logits = self.stage.kernels.linear(flat, self.weight)
        parts = (*before, logits.reshape(*h.shape[:-1], len(self.weight)))
        if self.last:
            return arrays.concatenate(parts, h.ndim - 1), (h.shape, flat)
        return (h, *parts), (h.shape, flat)

    def _back_from_logits(self, dy: Array, saved: Saved, of_input: bool, of_weight: bool) -> Tree:
        shape, flat = saved
        kernels = self.stage.kernels
        if self.last:
            slices = even_split(self.vocab, self.of)
            dy = [None, *(arrays.copied(dy[..., part.start : part.stop]) for part in slices)]
        dh, *before, dlogits = dy
        dlogits = rows(dlogits)
        if of_weight:
            self._add("weight", kernels.linear_backward_weight, dlogits, flat)
        if not of_input:
            return None
        dx = kernels.linear_backward_input(dlogits, self.weight).reshape(shape)
        if dh is not None:
            dx = kernels.add(dh, dx)
        if before:
            return (dx, *before)
        return dx

    # -- losses

    def _losses(self, h: Array, *carried: Array) -> tuple[Tree, Saved]:
        stage = self.stage
        flat = rows(h)
        shape = h.shape[:-1]
        labels: Any = stage.taken(LABELS)
        if not arrays.is_array(labels) or labels.shape != shape:
            raise ArgumentError(
                f"layer {self.name} (HeadSlice): the labels do not fit its input",
                found=f"labels {getattr(labels, 'shape', type(labels).__name__)}, input {h.shape}",
                expected="labels (...) for an input (..., dim)",
            )
        what = f"layer {self.name} (HeadSlice): the labels"
        ids = checked_ids(labels, self.vocab, what, stage.device).reshape(-1)
        kind = arrays.accumulator(stage.dtype)
        if not self.number:
            lse = arrays.empty(shape, kind, stage.device)
            arrays.fill(lse, -np.inf)
            carried = (lse, arrays.zeros(shape, kind, stage.device))
        before = [sums.reshape(-1) for sums in carried]
        after = [arrays.empty(sums.shape, kind, stage.device) for sums in before]
        logits_nbytes = len(flat) * self.vocab * flat.dtype.itemsize
        keeps = stage.position.training and logits_nbytes <= KEPT_BYTES[stage.device]
        logits_of_tiles: list[Array] = []
        columns = (self.first, self.vocab)
        for at in tiles(stage, len(flat), self._tile):
            logits = stage.kernels.linear(flat[at], self.weight)
            old = [sums[at] for sums in before]
            new = [sums[at] for sums in after]
            stage.kernels.running_lse(logits, ids[at], columns, old, new)
            if keeps:
                logits_of_tiles.append(logits)
            del logits
        saved = h.shape, flat, ids, before[0], after[0], logits_of_tiles
        lse, t = after
        if self.last:
            losses = stage.kernels.add(lse, stage.kernels.scale(t, -1.0))
            return losses.reshape(shape), saved
        return (h, lse.reshape(shape), t.reshape(shape)), saved

    def _back(self, dy: Array, saved: Saved, of_input: bool, of_weight: bool) -> Tree:
        """Compute the gradient of the input, add to that of the weight, or both."""
        if not self.takes:
            return self._back_from_logits(dy, saved, of_input, of_weight)
        shape, flat, ids, before, lse, logits_of_tiles = saved
        kernels = self.stage.kernels
        device = self.stage.device
        if self.last:
            dy = (None, dy, kernels.scale(dy, -1.0))
        dh = None
        if dy[0] is not None:
            dh = rows(dy[0])
        slopes = [slope.reshape(-1) for slope in dy[1:]]
        dx = None
        if of_input:
            dx = arrays.empty(flat.shape, flat.dtype, device)
        for number, at in enumerate(tiles(self.stage, len(flat), self._tile)):
            if logits_of_tiles:
                logits = logits_of_tiles[number]
                dlogits = arrays.empty_like(logits)
            else:
                logits = kernels.linear(flat[at], self.weight)
                dlogits = logits
            here = [slope[at] for slope in slopes]
            kernels.running_lse_backward(logits, ids[at], self.first, lse[at], here, dlogits)
            if of_weight:
                self._add("weight", kernels.linear_backward_weight, dlogits, flat[at])
            if dx is not None:
                part = kernels.linear_backward_input(dlogits, self.weight)
                if dh is not None:
                    part = kernels.add(dh[at], part)
                kernels.copy(part, dx[at])
        if dx is None:
            return None
        dx = dx.reshape(shape)
        if not self.number:
            return dx
        # L before is one more logit, of no label.
        dbefore = arrays.empty((len(flat), 1), before.dtype, device)
        kernels.running_lse_backward(before.reshape(-1, 1), ids, self.vocab, lse, slopes, dbefore)
        return dx, dbefore.reshape(shape[:-1]), slopes[1].reshape(shape[:-1])

    @property
    def _tile(self) -> int:
        return tile_rows(len(self.weight), self.weight.dtype.itemsize, self.stage.device)


def check_slices(entries: Sequence[object]) -> None:
    """Raise ArgumentError unless slices of a head are the last layers of a model, in order."""
    slices: list[HeadSlice] = []
    places = []
    for place, top in enumerate(entries):
        for _, layer in top.walk("") if isinstance(top, Layer) else ():
            if isinstance(layer, HeadSlice):
                slices.append(layer)
                places.append(place)
    if not slices:
        return
    of = slices[0].of
    order = [(layer.number, layer.of) for layer in slices]
    last = entries[-1]
    ends = isinstance(last, Layer) and leaf(last, -1) is slices[-1]
    apart = places[-1] - places[0] >= len({*places})
    if apart or not ends or order != [(number, of) for number in range(of)]:
        named = [f"slice {n} of {of}" for n, of in order]
        raise ArgumentError(
            "the slices of a head are not the last layers of the model, one after the other",
            found=f"{', '.join(named)}, and {len(entries)} layers",
            expected=f"slices 0 to {of - 1}, of which slice {of - 1} is the last layer",
            remedy="put them at the end, in their order; or take nn.Head, which other layers may "
            "follow",
        )
