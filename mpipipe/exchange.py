"""Layers that exchange parts of fields with the ranks of a communicator, forward and backward.

A field, (batch, space, channels) with one or more axes of space, is cut along one of these, and its
shards stand in the order of the ranks. All ranks make the same calls in the same order: they run
the same layers for the same micro-batches in the order of one schedule, as the ranks of `mesh.seq`
do. Before each forward and each backward a small all-gather compares what they do, so that a
difference is an error on all ranks and not a wrong number. Weights that all ranks hold get the
gradient of each rank's shard; a Pipeline with `replicas=mesh.replicas` sums them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array, Shape
from mpipipe.attention import Layout
from mpipipe.comm import Index, PartMove, Transfer, all_to_all, along, exchange_on, halo_of
from mpipipe.errors import ArgumentError, MpipipeError
from mpipipe.even_split import even_split
from mpipipe.job import Communicator, group_of, raise_on_all, runtime
from mpipipe.nn import Conv, Layer, Pending, Saved
from mpipipe.text import counted

__all__ = ["HaloConv", "HaloExchange"]
__dir__ = __all__.copy

REMEDY = (
    "make the same layers on all ranks, and call them in the same order with arrays of the "
    "same kind"
)


class _OverRanks(Layer):
    """What the ranks of a communicator agree on for a layer that exchanges parts of arrays."""

    takes_integers = False
    _words = "a halo"

    def _agree(self, comm: Communicator | None, axes: Sequence[int], **options: object) -> None:
        """Agree on the options of a new layer, and on the axes of x among them."""
        self._comm = runtime.resolve(comm)
        self._group = group_of(self._comm)
        self._options = tuple(options.items())
        self._kind = type(self).__name__
        call = f"construction of {self._kind}"
        with self._group.raise_together(call):
            are_axes = all(isinstance(axis, int) and axis > 0 for axis in axes)
            if not are_axes or len(axes) != len(set(axes)):
                raise ArgumentError(
                    f"{self._kind}: axes of x",
                    found=repr(axes),
                    expected="integers from 1; 0 is the batch",
                )
            self._check()
        self._axes = 1 + max(axes)
        self._group.agree(call, self._options, remedy=REMEDY)

    def _check(self) -> None:
        """Raise ArgumentError for options without sense."""

    def _begin(
        self, x: Array, axis: int, error: MpipipeError | None = None
    ) -> tuple[tuple[int, ...], int]:
        """Begin a forward; return the lengths of all shards, and the number of the call.

        `error` is what is wrong with x.
        """
        facts = self._options
        length = 0
        if arrays.is_array(x) and x.ndim >= self._axes and arrays.is_floating(x.dtype):
            length = x.shape[axis]
            facts += (("shape", (*x.shape[:axis], None, *x.shape[axis + 1 :])), *_kind_of(x))
        else:
            found = type(x).__name__
            if arrays.is_array(x):
                found = f"{x.dtype}{list(x.shape)}"
            error = ArgumentError(
                f"layer {self.name} ({self._kind}): the input",
                found=found,
                expected=f"numbers with a gradient, along {self._axes} axes or more",
            )
        call = f"forward of layer {self.name} ({self._kind})"
        table = self._group.agree(call, facts, [length], error, remedy=REMEDY)
        return tuple(table[:, 0].tolist()), self._group.calls

    def _begin_backward(self, dy: Array, shape: Shape, call: int) -> None:
        """Begin the backward of the forward with this number, whose output had this shape."""
        name = f"layer {self.name} ({self._kind})"
        error = None
        if dy.shape != shape:
            error = ArgumentError(
                f"{name}: the gradient of the output",
                found=f"shape {dy.shape}",
                expected=f"{shape}",
            )
        facts = (("forward", call), *_kind_of(dy))
        self._group.agree(f"backward of {name}", facts, error=error, remedy=REMEDY)

    def _move(
        self, moves: Iterable[PartMove], x: Array, y: Array, call: int, own: Index | None = None
    ) -> tuple[Array, Saved]:
        """Fill y, in which x lies at `own`, or in parts; return it, and `saved`."""
        transfer = Transfer(exchange_on(self._comm, arrays.device_of(x)), moves, x, y)
        if own is not None:
            arrays.strided_copy(x, y[own])
        return transfer.finish(), (moves, own, x.shape, y.shape, call)

    def backward_input(self, dy: Array, saved: Saved) -> tuple[Array, Pending]:
        *_, shape, call = saved
        self._begin_backward(dy, shape, call)
        return self._bring_home(dy, saved), None

    def _bring_home(self, dy: Array, saved: Saved) -> Array:
        """Return the gradient of x from that of y."""
        moves, own, shape, _, _ = saved
        with self._group.failing(f"the backward of {self._words}"):
            kind = dy.dtype
            if own is not None:
                kind = arrays.accumulator(kind)
            device = arrays.device_of(dy)
            dx = arrays.empty(shape, kind, device)
            through = exchange_on(self._comm, device)
            transfer = Transfer(through, moves, dy, dx, transposed=True, add=own is not None)
            if own is not None:
                arrays.strided_copy(dy[own], dx)
            return arrays.cast(transfer.finish(), dy.dtype)


def _kind_of(array: Array) -> tuple[tuple[str, object], ...]:
    """The facts of an array in which ranks must agree."""
    return ("dtype", array.dtype.name), ("device", arrays.device_of(array))


class HaloExchange(_OverRanks):
    """Gives x points of neighbouring shards at the ends of one axis; gradients go home.

        rank 0   a b c d            . a b c d e
        rank 1   e f g        ->    d e f g h          width 1, not periodic: . is 0
        rank 2   h i                g h i .

    x is this rank's shard, of any length along the axis, in the order of the ranks; its other axes
    are equal on all ranks. A halo that is wider than the neighbour's shard reaches over several.
    What lies beyond the ends of the whole is 0; with `periodic` it is the other end. Messages
    travel while x is copied. For a convolution see `HaloConv`.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm or None
        The ranks that share the field, such as `mesh.seq`, in the order of their shards. None: all
        ranks.
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
        On all ranks, from the constructor, `forward` and `backward_input`, which are collective: an
        argument has no sense, or ranks differ in the layer or in x, but for its length along the
        axis.

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

    _conv = ""  # set by HaloConv

    def __init__(
        self,
        comm: Communicator | None,
        axis: int,
        width: int | tuple[int, ...],
        periodic: bool = False,
        layout: Layout | None = None,
    ):
        self.axis = axis
        self.periodic = bool(periodic)
        self.layout = layout
        self.width: Any = width
        if not isinstance(width, tuple):
            self.width = (width, width)
        self._agree(
            comm,
            [axis],
            axis=axis,
            width=self.width,
            periodic=self.periodic,
            convolution=self._conv,
        )

    def _check(self) -> None:
        layout = self.layout
        ranks = self._group.size
        are_extents = all(isinstance(extent, int) and extent >= 0 for extent in self.width)
        if len(self.width) != 2 or not are_extents:
            raise ArgumentError(
                "width of a halo", found=repr(self.width), expected="two integers of at least 0"
            )
        if layout is None:
            return
        if layout.kind != "contiguous" or layout.ranks != ranks or layout.slice_lengths:
            slices = " with slices" * bool(layout.slice_lengths)
            raise ArgumentError(
                "a halo needs shards that follow each other in the order of the ranks",
                found=f"a {layout.kind} Layout of {counted(layout.ranks, 'rank')}{slices}",
                expected=f"a contiguous one of {counted(ranks, 'rank')}, as in the communicator",
                remedy="cut the field by such a Layout",
            )

    def _check_lengths(self, lengths: tuple[int, ...]) -> None:
        """Raise ArgumentError for shards of lengths without sense, the same on all ranks."""

    def forward(self, x: Array) -> tuple[Array, Saved]:
        return self._exchange(x)

    def _exchange(self, x: Array, error: MpipipeError | None = None) -> tuple[Array, Any]:
        """Return x with its halo, and `saved`. `error` is what this rank has against x."""
        axis = self.axis
        layout = self.layout
        rank = self._group.rank
        if layout is not None and x.shape[axis : axis + 1] != (layout.length(rank),):
            error = ArgumentError(
                f"layer {self.name} ({self._kind}): the input is not this rank's shard",
                found=f"shape {x.shape}",
                expected=f"{layout.length(rank)} of {layout.seq_len} points along axis {axis}",
            )
        lengths, call = self._begin(x, axis, error)
        try:
            self._check_lengths(lengths)
            moves, beyond = halo_of(lengths, rank, axis, self.width, self.periodic)
        except ArgumentError as problem:  # every rank finds the same in the same table
            raise_on_all(0, problem, self._group)
        with self._group.failing("the forward of a halo"):
            make = arrays.empty
            if beyond:
                make = arrays.zeros
            shape = (*x.shape[:axis], sum(self.width) + lengths[rank], *x.shape[axis + 1 :])
            y = make(shape, x.dtype, arrays.device_of(x))
            before = self.width[0]
            return self._move(moves, x, y, call, along(axis, before, before + lengths[rank]))


class HaloConv(HaloExchange):
    """An `nn.Conv` of a field that is cut along one axis over ranks, equal to the whole.

    It takes the halo that its window needs. Parameters have the names of those of the convolution,
    which is not used elsewhere. For an example see docs/layers.md.

    Parameters
    ----------
    comm, axis : Communicator, int
        As for `HaloExchange`; the axis is one of space. Each shard has a point at least, and begins
        at a multiple of the stride.
    conv : nn.Conv
        The convolution of the whole field, with padding "same" or "periodic" along the axis.
    layout : attention.Layout, optional
        As for `HaloExchange`.

    Raises
    ------
    ArgumentError, MismatchError
        As for `HaloExchange`; and on all ranks, where the convolution does not fit the field or its
        shards.
    """

    def __init__(
        self, comm: Communicator | None, axis: int, conv: Conv, layout: Layout | None = None
    ):
        self.conv = conv
        self._padding = "valid"
        self._size = 1
        before = 0
        if isinstance(conv, Conv) and axis in range(1, len(conv.width) + 1):
            self._padding = conv.padding[axis - 1]
            self._size = conv.width[axis - 1]
            before = conv.before[axis - 1]
            self._conv = repr(
                (conv.inputs, conv.outputs, conv.width, conv.stride, conv.groups, conv.padding)
            )
        super().__init__(
            comm, axis, (before, self._size - 1 - before), self._padding == "periodic", layout
        )
        conv.padding = (*conv.padding[: axis - 1], "valid", *conv.padding[axis:])
        conv.before = (*conv.before[: axis - 1], 0, *conv.before[axis:])

    def _check(self) -> None:
        super()._check()
        if self._padding == "valid":
            raise ArgumentError(
                "HaloConv needs an axis of space along which its convolution is padded",
                found=f"axis {self.axis!r} of "
                f"{getattr(self.conv, 'padding', type(self.conv).__name__)}",
                expected='an nn.Conv with "same" or "periodic" there',
            )

    def walk(self, name: str) -> Iterator[tuple[str, Layer]]:
        yield name, self
        yield from self.conv.walk(name)

    def _check_lengths(self, lengths: tuple[int, ...]) -> None:
        total = sum(lengths)
        step = self.conv.stride
        fits = not np.any(np.cumsum(lengths[:-1]) % step)
        if self.periodic and (total % step or total < self._size):
            fits = False
        if not fits:
            raise ArgumentError(
                f"layer {self.name} (HaloConv): the window or the stride does not fit the shards "
                "of the field",
                found=f"{list(lengths)} points, width {self._size}, stride {step}, padding "
                f"{self._padding!r}",
                expected="shards that begin at multiples of the stride; of a periodic axis, a "
                "window and whole strides",
            )

    def forward(self, x: Array) -> tuple[Array, Saved]:
        error = None
        try:
            shape = list(x.shape)
            if x.ndim > self.axis:
                shape[self.axis] += sum(self.width)
            self.conv._sizes(np.broadcast_to(0.0, shape))
        except ArgumentError as problem:
            error = problem
        wider, of_halo = self._exchange(x, error)
        with self._group.failing("the forward of a HaloConv"):
            y, saved = self.conv.forward(wider)
            return y, (saved, of_halo, y.shape)

    def backward_input(self, dy: Array, saved: Saved) -> tuple[Array, Pending]:
        of_conv, of_halo, shape = saved
        self._begin_backward(dy, shape, of_halo[-1])
        with self._group.failing("the backward of a HaloConv"):
            dwider, pending = self.conv.backward_input(dy, of_conv)
        return self._bring_home(dwider, of_halo), pending

    def backward_weight(self, pending: Pending) -> None:
        self.conv.backward_weight(pending)


class AllToAll(_OverRanks):
    """y has all of an axis that is cut over the ranks, and this rank's part of another axis.

        rank 0   a b    scatter axis: down     a b c d
                 e f    gather axis: across
        rank 1   c d                           e f g h
                 g h

    Each rank cuts the scatter axis of x into parts that differ by one at most, the longer ones
    first, and sends part r to rank r. What arrives stands along the gather axis in the order of the
    ranks. The layer with the axes exchanged is the way back, where the shards had the lengths of
    such a cut, as those of a contiguous `Layout` have. In between, a layer sees all of an axis, and
    its parameters are those of this rank's part of the other.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm or None
        The ranks that share the field, such as `mesh.seq`. None: all ranks.
    scatter_axis, gather_axis : int
        Two axes of x, 1 or more: the one that lies whole on each rank, and the one that is cut over
        the ranks.

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

    _words = "an AllToAll"

    def __init__(self, comm: Communicator | None, scatter_axis: int, gather_axis: int):
        self.scatter_axis = scatter_axis
        self.gather_axis = gather_axis
        axes = {"scatter_axis": scatter_axis, "gather_axis": gather_axis}
        self._agree(comm, [*axes.values()], **axes)

    def forward(self, x: Array) -> tuple[Array, Saved]:
        group = self._group
        scatter = self.scatter_axis
        gather = self.gather_axis
        lengths, call = self._begin(x, gather)
        with group.failing("the forward of an AllToAll"):
            parts = even_split(x.shape[scatter], group.size)
            end = 0
            takes = []
            for length in lengths:
                takes.append([along(gather, end, end + length)])
                end += length
            gives = [[along(scatter, part.start, part.stop)] for part in parts]
            moves = all_to_all(group.rank, gives, takes)
            shape = list(x.shape)
            shape[scatter] = len(parts[group.rank])
            shape[gather] = end
            y = arrays.empty(tuple(shape), x.dtype, arrays.device_of(x))
            return self._move(moves, x, y, call)
