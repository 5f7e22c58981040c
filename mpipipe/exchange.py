"""Layers that exchange parts of fields with the ranks of a communicator, forward and backward.

A field (batch, *space, channels) is cut along one axis of space, and its shards stand in the order of the ranks. All
ranks make the same calls in the same order: they run the same layers for the same micro-batches in the order of one
schedule, as the ranks of `mesh.seq` do. Before each forward and each backward a small all-gather compares what they do,
so that a difference is an error on all ranks and not a wrong number. Weights that all ranks hold get the gradient of
each rank's shard; a Pipeline with `replicas=mesh.replicas` sums them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.attention import Layout
from mpipipe.comm import PartMove, Transfer, all_to_all, along, exchange_on, halo_of
from mpipipe.errors import ArgumentError, MpipipeError
from mpipipe.even_split import even_split
from mpipipe.job import Communicator, group_of, raise_on_all, runtime
from mpipipe.nn import Layer
from mpipipe.text import counted

__all__ = ["AllToAll", "HaloExchange"]

REMEDY = "make the same layers on all ranks, and call them in the same order with arrays of the same kind"


class _OverRanks(Layer):
    """What the ranks of a communicator agree on for a layer that exchanges parts of arrays."""

    takes_integers = False

    def _agree(self, comm: Communicator | None, **options: Any) -> None:
        """Agree on the options of a new layer; those called axis are to be axes of x."""
        self._comm = runtime.resolve(comm)
        self._group = group_of(self._comm)
        self._options, self._kind = tuple(options.items()), type(self).__name__
        error: MpipipeError | None = None
        axes = [value for name, value in self._options if name.endswith("axis")]
        if not all(isinstance(axis, int) and axis > 0 for axis in axes) or len(axes) != len(set(axes)):
            error = ArgumentError(
                f"{self._kind}: axes of x", found=repr(axes), expected="integers from 1; 0 is the batch"
            )
        self._axes = 1 + max(axes) if error is None else 0
        try:
            self._check()
        except MpipipeError as caught:
            error = error or caught
        self._group.agree(f"construction of {self._kind}", self._options, error=error, remedy=REMEDY)

    def _check(self) -> None:
        """Raise ArgumentError for options without sense."""

    def _begin(self, x: Array, axis: int, error: MpipipeError | None = None) -> tuple[tuple[int, ...], int]:
        """Begin a forward; return the lengths of all shards, and the number of the call. `error` is what x has."""
        facts, length = self._options, 0
        if not arrays.is_array(x) or x.ndim < self._axes or not arrays.is_floating(x.dtype):
            found = f"{x.dtype}{list(x.shape)}" if arrays.is_array(x) else type(x).__name__
            expected = f"numbers with a gradient, along {self._axes} axes or more"
            error = ArgumentError(f"layer {self.name} ({self._kind}): the input", found=found, expected=expected)
        else:
            length, shape = x.shape[axis], (*x.shape[:axis], None, *x.shape[axis + 1 :])
            facts = (*facts, ("shape", shape), ("dtype", x.dtype.name), ("device", arrays.device_of(x)))
        call = f"forward of layer {self.name} ({self._kind})"
        table = self._group.agree(call, facts, [length], error, remedy=REMEDY)
        return tuple(table[:, 0].tolist()), self._group.calls

    def _begin_backward(self, dy: Array, shape: Shape, call: int) -> None:
        """Begin the backward of the forward with this number, whose output had this shape."""
        name, error = f"layer {self.name} ({self._kind})", None
        if dy.shape != shape:
            error = ArgumentError(f"{name}: the gradient of the output", found=f"shape {dy.shape}", expected=f"{shape}")
        facts = ("forward", call), ("dtype", dy.dtype.name), ("device", arrays.device_of(dy))
        self._group.agree(f"backward of {name}", facts, error=error, remedy=REMEDY)

    def _transfer(self, moves: Iterable[PartMove], x: Array, y: Array, **options: bool) -> Transfer:
        return Transfer(exchange_on(self._comm, arrays.device_of(x)), moves, x, y, **options)


class HaloExchange(_OverRanks):
    """y is x with points of the neighbouring shards at both ends of one axis; their gradients go home again.

        rank 0   a b c d            . a b c d e
        rank 1   e f g        ->    d e f g h          width 1, not periodic: . is 0
        rank 2   h i                g h i .

    x is this rank's shard, of any length along the axis, in the order of the ranks; its other axes are equal on all
    ranks. A halo that is wider than the neighbour's shard reaches over several. What lies beyond the ends of the whole
    is 0, as for padding "same" of `nn.Conv`; with `periodic` it is the other end. Messages travel while x is copied.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm or None
        The ranks that share the field, such as `mesh.seq`, in the order of their shards. None: all ranks.
    axis : int
        The axis of x that is cut, 1 or more.
    width : int or tuple of int
        Points before and after the shard: one number for both, or two.
    periodic : bool
        Whether the first shard follows the last one.
    layout : attention.Layout, optional
        What cut the field: it must be contiguous, and its lengths are compared with those of x.

    Raises
    ------
    ArgumentError, MismatchError
        On all ranks, from the constructor, `forward` and `backward_input`, which are collective: an argument has no
        sense, or ranks differ in the layer or in x, but for its length along the axis.

    Examples
    --------
    Two threads stand for two MPI ranks here:

    >>> import numpy as np
    >>> from mpipipe import nn
    >>> from mpipipe.exchange import HaloExchange
    >>> from mpipipe.job import inprocess
    >>> def on_each_rank(comm):
    ...     stage = nn.Stage([HaloExchange(comm, axis=1, width=1, periodic=True)])
    ...     x = np.arange(3, dtype=np.float32).reshape(1, 3, 1) + 10 * comm.rank
    ...     return stage.forward(x)[0].ravel().astype(int).tolist()
    >>> inprocess.run(2, on_each_rank)
    [[12, 0, 1, 2, 10], [2, 10, 11, 12, 0]]
    """

    def __init__(
        self,
        comm: Communicator | None,
        axis: int,
        width: int | tuple[int, ...],
        periodic: bool = False,
        layout: Layout | None = None,
    ):
        self.axis, self.periodic, self.layout = axis, bool(periodic), layout
        self.width: Any = width if isinstance(width, tuple) else (width, width)
        self._agree(comm, axis=axis, width=self.width, periodic=self.periodic)

    def _check(self) -> None:
        layout, ranks = self.layout, self._group.size
        if len(self.width) != 2 or not all(isinstance(each, int) and each >= 0 for each in self.width):
            raise ArgumentError("width of a halo", found=repr(self.width), expected="two integers of at least 0")
        if layout is not None and (layout.kind, layout.ranks) != ("contiguous", ranks):
            raise ArgumentError(
                "a halo needs shards that follow each other in the order of the ranks",
                found=f"a {layout.kind} Layout of {counted(layout.ranks, 'rank')}",
                expected=f"a contiguous one of {counted(ranks, 'rank')}, as in the communicator",
                remedy="cut the field by such a Layout",
            )

    def _halo(self, x: Array, apart: bool, error: MpipipeError | None = None) -> tuple[Transfer, Any]:
        """Begin a forward: return the transfer that ends with y, or with its halo unless `apart`, and `saved`."""
        axis, layout, rank = self.axis, self.layout, self._group.rank
        if layout is not None and x.shape[axis : axis + 1] != (layout.length(rank),):
            error = ArgumentError(
                f"layer {self.name} ({self._kind}): the input is not this rank's shard",
                found=f"shape {x.shape}",
                expected=f"{layout.length(rank)} of {layout.seq_len} points along axis {axis}",
            )
        lengths, call = self._begin(x, axis, error)
        gap = x.shape[axis] if apart else 0
        try:
            moves, beyond = halo_of(lengths, rank, axis, self.width, self.periodic, gap)
        except ArgumentError as found:  # every rank finds the same in the same table
            raise_on_all(0, found, self._group)
        with self._group.failing("the forward of a halo"):
            make = arrays.zeros if beyond else arrays.empty
            y = make((*x.shape[:axis], sum(self.width) + gap, *x.shape[axis + 1 :]), x.dtype, arrays.device_of(x))
            return self._transfer(moves, x, y), (moves, x.shape, y.shape, call, lengths)

    def forward(self, x: Array) -> tuple[Array, Any]:
        transfer, saved = self._halo(x, apart=True)
        with self._group.failing("the forward of a HaloExchange"):
            before = self.width[0]
            arrays.strided_copy(x, transfer.y[along(self.axis, before, before + x.shape[self.axis])])
            return transfer.finish(), saved

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        moves, shape, expected, call, _ = saved
        self._begin_backward(dy, expected, call)
        with self._group.failing("the backward of a HaloExchange"):
            before = self.width[0]
            dx = arrays.empty(shape, arrays.accumulator(dy.dtype), arrays.device_of(dy))
            transfer = self._transfer(moves, dy, dx, transposed=True, add=True)
            arrays.strided_copy(dy[along(self.axis, before, before + shape[self.axis])], dx)
            return arrays.cast(transfer.finish(), dy.dtype), None


class AllToAll(_OverRanks):
    """y has all of an axis that is cut over the ranks, and this rank's part of another axis.

        rank 0   a b    scatter axis: down     a b c d
                 e f    gather axis: across
        rank 1   c d                           e f g h
                 g h

    Each rank cuts the scatter axis of x into parts that differ by one at most, the longer ones first, and sends part r
    to rank r. What arrives stands along the gather axis in the order of the ranks. The layer with the axes exchanged is
    the way back, where the shards had the lengths of such a cut, as those of a contiguous `Layout` have. In between,
    a layer sees all of an axis, and its parameters are those of this rank's part of the other.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm or None
        The ranks that share the field, such as `mesh.seq`. None: all ranks.
    scatter_axis, gather_axis : int
        Two axes of x, 1 or more: the one that lies whole on each rank, and the one that is cut over the ranks.

    Raises
    ------
    ArgumentError, MismatchError
        As for `HaloExchange`.

    Examples
    --------
    >>> import numpy as np
    >>> from mpipipe import nn
    >>> from mpipipe.exchange import AllToAll
    >>> from mpipipe.job import inprocess
    >>> def on_each_rank(comm):
    ...     there, back = AllToAll(comm, 2, 1), AllToAll(comm, 1, 2)
    ...     y, _ = nn.Stage([there]).forward(np.ones((1, 3, 4), np.float32))
    ...     return y.shape, nn.Stage([back]).forward(y)[0].shape
    >>> inprocess.run(2, on_each_rank)
    [((1, 6, 2), (1, 3, 4)), ((1, 6, 2), (1, 3, 4))]
    """

    def __init__(self, comm: Communicator | None, scatter_axis: int, gather_axis: int):
        self.scatter_axis, self.gather_axis = scatter_axis, gather_axis
        self._agree(comm, scatter_axis=scatter_axis, gather_axis=gather_axis)

    def forward(self, x: Array) -> tuple[Array, Any]:
        group, scatter, gather = self._group, self.scatter_axis, self.gather_axis
        lengths, call = self._begin(x, gather)
        with group.failing("the forward of an AllToAll"):
            parts, ends = even_split(x.shape[scatter], group.size), np.cumsum(lengths).tolist()
            takes = [[along(gather, end - length, end)] for length, end in zip(lengths, ends)]
            gives = [[along(scatter, part.start, part.stop)] for part in parts]
            moves, shape = all_to_all(group.rank, gives, takes), list(x.shape)
            shape[scatter], shape[gather] = len(parts[group.rank]), ends[-1]
            y = arrays.empty(tuple(shape), x.dtype, arrays.device_of(x))
            return self._transfer(moves, x, y).finish(), (moves, x.shape, y.shape, call)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        moves, shape, expected, call = saved
        self._begin_backward(dy, expected, call)
        with self._group.failing("the backward of an AllToAll"):
            dx = arrays.empty(shape, dy.dtype, arrays.device_of(dy))
            return self._transfer(moves, dy, dx, transposed=True).finish(), None
