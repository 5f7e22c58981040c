"""A rank's share of each sample, along an axis that the ranks of `mesh.seq` divide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpipipe.arrays import Array
from mpipipe.attention import Layout, Local, Ring, Sliced
from mpipipe.errors import ConfigError
from mpipipe.job import Communicator, group_of
from mpipipe.nn import Attend
from mpipipe.text import counted


class Shard:
    """The share of one rank in each sample; data, positions and attention of it fit together.

    Parameters
    ----------
    comm : communicator
        The ranks that share each sample.
    layout : str
        Which positions each of them holds: "contiguous", "zigzag" or "striped"; see
        `attention.Layout`.
    size : int, optional
        Number of these ranks, where the ranks of `comm` stand for more: on paper.

    Attributes
    ----------
    comm, rank, size, kind : communicator, int, int, str
        The ranks, which of them this is, how many there are, and the layout.
    reads_inputs, reads_targets : bool
        Whether this rank has the first stage and needs inputs, and whether it has the last one and
        needs targets. In place of what is not needed, `Task.batch` may return None.
    dtype, seed : numpy.dtype, int
        What the training computes in; floating arrays of batches are converted. And its seed.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe.job import inprocess
    >>> from mpipipe.train import Shard
    >>> field = np.arange(6).reshape(1, 6)
    >>> inprocess.run(2, lambda comm: Shard(comm).part(field, axis=1).tolist())
    [[[0, 1, 2]], [[3, 4, 5]]]
    """

    reads_inputs = True
    reads_targets = True
    seed = 0
    # The length that `attend` was called with.
    attended: int | None = None
    # Gives the lengths of slices, where there are several.
    cut: Callable[[int], Sequence[int]] | None = None
    # Positions that this rank holds of each slice, where sequences attend in slices.
    slice_lengths: Sequence[int] | None = None

    def __init__(
        self, comm: Communicator, layout: str = "contiguous", size: int | None = None
    ) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.kind = layout
        self.size = size or comm.size
        self.dtype = np.dtype(np.float32)
        self._divided: dict[int, Layout] = {}

    def divide(self, length: int) -> Layout:
        """Return who holds which of `length` positions. ConfigError if a rank would hold none."""
        if length in self._divided:
            return self._divided[length]
        layout = Layout(self.kind, self.size, length, self.cut and self.cut(length))
        slices = [layout]
        if layout.slice_lengths is not None:
            count = len(layout.slice_lengths)
            slices = [layout.part(number, number + 1) for number in range(count)]
        if any(part.length(rank) == 0 for part in slices for rank in range(self.size)):
            raise ConfigError(
                "a rank would hold no part of the sequence",
                found=f"length {length} on {counted(self.size, 'rank')}, {self.kind}, in "
                f"{counted(len(slices), 'slice')}",
                expected="at least one position a rank, two for zigzag",
                remedy="take longer sequences, or lower seq or slices",
            )
        self._divided[length] = layout
        return layout

    def part(self, array: Array, axis: int = 1) -> Array:
        """Return this rank's part of an array along an axis, as a C-contiguous copy.

        A single rank gets the array itself. The array may be anything with `shape` that
        `numpy.asarray` reads, such as an array of Zarr or h5py. Parts may differ by one position,
        with zigzag by two.
        """
        if self.size == 1:
            return np.asarray(array)
        layout = self.divide(array.shape[axis])
        if self.kind != "contiguous" or self.cut is not None:
            return layout.shard(np.asarray(array), self.rank, axis)
        # Of an array on the disk no more than the part is read.
        places = layout.positions(self.rank)
        before = [slice(None)] * (axis % len(array.shape))
        return np.ascontiguousarray(array[*before, slice(int(places[0]), int(places[-1]) + 1)])

    def whole(self, array: Array, axis: int = 1) -> Array:
        """Put an array together on each rank, from the parts of all; collective over `comm`."""
        if self.size == 1:
            return array
        parts = group_of(self.comm).gather("the parts of an array", array)
        length = sum(part.shape[axis] for part in parts)
        return self.divide(length).unshard(parts, axis)

    def positions(self, length: int) -> Array:
        """Return which of `length` positions of the whole this rank holds: int64, rising."""
        return self.divide(length).positions(self.rank)

    def attend(
        self,
        length: int,
        causal: bool = False,
        window: int | None = None,
        scale: float | None = None,
    ) -> Attend:
        """Make exact attention over the whole sequence, for `nn.SelfAttention`; collective.

        Parameters
        ----------
        length : int
            Of the whole sequence.
        causal, window, scale : bool, int and float, optional
            As for `attention.Local`. Where sequences come in slices, attention is causal.
        """
        if self.cut is not None and (not causal or self.attended not in (None, length)):
            raise ConfigError(
                "slices of a sequence cannot attend in this way",
                found=f"attention over {length} positions, causal={causal}",
                expected="causal attention, over sequences of one length in all layers",
                remedy="slices = 1, or causal=True",
            )
        layout = self.divide(length)
        attend: Local | Ring
        if self.comm.size == 1:
            attend = Local(causal, scale, window)
            # On paper rows are those of a rank.
            if self.size > 1:
                places = layout.positions(self.rank)
                attend.positions = lambda rows: places  # type: ignore[method-assign]
        else:
            attend = Ring(self.comm, causal, layout, window, scale=scale)
        self.attended = length
        if self.cut is None:
            return attend
        sliced = Sliced(attend, self.cut(length))
        self.slice_lengths = sliced.slice_rows
        return sliced
