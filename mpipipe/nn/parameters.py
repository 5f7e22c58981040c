"""Parameters: their descriptions, and the flat buffers with named views."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import ALIGNMENT, Array, Shape
from mpipipe.errors import ArgumentError
from mpipipe.even_split import even_split
from mpipipe.nn.random import initial_generator
from mpipipe.text import counted

Draw: TypeAlias = Callable[[np.random.Generator, Shape], np.ndarray]


@dataclass(frozen=True)
class Parameter:
    """What a layer says about one of its arrays before the array exists.

    Parameters
    ----------
    shape, draw : tuple of int, callable
        Shape of the array; `draw(generator, shape)` returns the initial values, of float64.
    decay : bool
        Whether weight decay applies. Layers here set it for matrices, and not for biases and gains.
    tie : str, optional
        Parameters with the same key, anywhere in the model, are one parameter. They start equal,
        because their initial values are drawn for the key and not for the name, and the pipeline
        sums their gradients.
    frozen : bool
        Whether the array stays as it is in a training: it has no gradient, and an optimizer does
        not see it.
    stream : str, optional
        What the initial values are drawn for, by default the tie or else the name: parts of one
        matrix share a stream.
    """

    shape: Shape
    draw: Draw
    decay: bool = True
    tie: str | None = None
    frozen: bool = False
    stream: str | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def ones(_generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Start with ones."""
    return np.ones(shape)


def zeros(_generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Start with zeros."""
    return np.zeros(shape)


def matrix(outputs: int, inputs: int, gain: float = 1.0, tie: str | None = None) -> Parameter:
    """Return a matrix that starts normal with standard deviation gain / sqrt(inputs)."""
    return normal((outputs, inputs), gain * inputs**-0.5, tie)


def normal(shape: Shape, std: float, tie: str | None = None) -> Parameter:
    """Return an array that starts normal with this standard deviation."""
    return Parameter(shape, partial(_normal, std), tie=tie)


def _normal(std: float, generator: np.random.Generator, shape: Shape) -> np.ndarray:
    return generator.standard_normal(shape) * std


def vector(size: int, draw: Draw = zeros) -> Parameter:
    """Return a vector without weight decay."""
    return Parameter((size,), draw, decay=False)


SKIPPED = 1 << 20  # elements that are drawn at a time, and dropped


def row_slices(whole: Parameter, parts: int, stream: str | None = None) -> list[Parameter]:
    """Cut a matrix into parameters of its rows, with the initial values of the whole.

    Those of a tied matrix are tied, each by a key of its own, and their stream is its tie.
    """
    width = whole.shape[1]

    def draw(start: int, generator: np.random.Generator, shape: Shape) -> np.ndarray:
        step = max(1, SKIPPED // width)
        for first in range(0, start, step):
            whole.draw(generator, (min(step, start - first), width))
        return whole.draw(generator, shape)

    slices = []
    for rows in even_split(whole.shape[0], parts):
        tie = None
        if whole.tie is not None:
            tie = f"{whole.tie} {rows.start}:{rows.stop}"
        slices.append(
            replace(
                whole,
                shape=(len(rows), width),
                draw=partial(draw, rows.start),
                tie=tie,
                stream=whole.tie or stream,
            )
        )
    return slices


class FlatBuffer(Mapping[str, Any]):
    """Named arrays that are views of one buffer.

    `flat` is one-dimensional and starts on a 64-byte boundary, as does every array in it. The gaps
    between the arrays are zero at the start, and stay zero under everything that maps zeros to
    zeros. While replicas keep a share of it each (optim/shards.py), `flat` and its arrays raise
    ArgumentError.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        Of the arrays, by name.
    dtype, device : str or numpy.dtype, str
        Of the buffer; "cpu", or "cuda" for the current GPU.
    narrowest : numpy.dtype, optional
        The narrowest dtype of the buffers that are to have the same offsets; by default `dtype`.
    order : iterable of str, optional
        The names as they lie in memory; by default that of `shapes`.

    Attributes
    ----------
    flat, whole : array
        The buffer, zero at the start; and as it was made, with what has been given up since.
    offsets : dict of str to int
        Where each array starts in it, in the order of memory; without those that lie in another
        buffer.

    Examples
    --------
    >>> from mpipipe import nn
    >>> buffer = nn.FlatBuffer({"weight": (2, 3), "bias": (3,)}, "float32")
    >>> buffer["bias"][...] = 1
    >>> buffer.flat.sum(), buffer.offsets["bias"]
    (np.float32(3.0), 16)
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        dtype: str | np.dtype,
        device: str = "cpu",
        narrowest: np.dtype | None = None,
        order: Iterable[str] | None = None,
    ):
        dtype = arrays.dtype(dtype)
        step = ALIGNMENT // (narrowest or dtype).itemsize
        self.offsets: dict[str, int] = {}
        end = 0
        for name in order or shapes:
            self.offsets[name] = end
            end += -(-math.prod(shapes[name]) // step) * step
        self._views: dict[str, Any] = {}
        # The buffer and name of arrays that lie in another buffer.
        self._elsewhere: dict[str, tuple[FlatBuffer, str]] = {}
        self._lay_out(arrays.zeros(end, dtype, device), shapes)

    def _lay_out(self, flat: Array, shapes: Mapping[str, Shape]) -> None:
        self.flat = self.whole = flat
        for name, shape in shapes.items():
            start = self.offsets[name]
            self._views[name] = flat[start : start + math.prod(shape)].reshape(shape)

    @property
    def flat(self) -> Array:
        """The buffer."""
        if self._flat is None:
            raise _divided_error("")
        return self._flat

    @flat.setter
    def flat(self, flat: Array) -> None:
        self._flat: Array | None = flat

    def __getitem__(self, name: str) -> Array:
        entry = self.entry(name)
        if not arrays.is_array(entry):
            raise _divided_error(f" {name}")
        return entry

    def entry(self, name: str) -> Any:
        """Return what is here of an array.

        Returns
        -------
        array or StateShard
            The array itself; or the optim.StateShard, where replicas keep a share of it each.
        """
        if name in self._elsewhere:
            buffer, key = self._elsewhere[name]
            return buffer.entry(key)
        return self._views[name]

    @property
    def is_divided(self) -> bool:
        """Whether replicas keep a share of `flat` each."""
        return self._flat is None

    def __repr__(self) -> str:
        size = f"{counted(len(self), 'array')} in {self.whole.size} numbers of {self.whole.dtype}"
        return f"<FlatBuffer of {size}>"

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def divide_buffer(buffer: FlatBuffer, share: Array, entries: Mapping[str, object]) -> None:
    """Replace `flat` by a share, and the arrays by `entries`.

    Old views of it become NaN, so that they are never used by mistake.
    """
    arrays.fill(buffer.flat, math.nan)
    buffer.whole = share
    buffer._flat = None
    buffer._views.update(entries)


def unite_buffer(buffer: FlatBuffer, flat: Array) -> None:
    """Let a buffer have all of `flat` again."""
    buffer._lay_out(flat, {name: buffer.entry(name).shape for name in buffer.offsets})


def showing(buffer: FlatBuffer, views: Mapping[str, Array]) -> FlatBuffer:
    """Return a buffer with the same `flat`, and these arrays in place of its own."""
    other = copy(buffer)
    other._views = dict(views)
    other.offsets = {}
    other._elsewhere = {}
    return other


def _divided_error(name: str) -> ArgumentError:
    return ArgumentError(
        f"the parameters{name} in float32 lie in shares on the replicas of a sharded optimizer",
        found="one share of them here, and all of them in half precision, as `compute`",
        remedy="read and write them within `with optimizer.whole_parameters():`, on all replicas "
        "together; build pipelines and set values before the optimizer",
    )


def draw_into(buffer: FlatBuffer, declared: Mapping[str, Parameter], seed: int) -> None:
    """Set the arrays of a buffer to the initial values of parameters."""
    for name, parameter in declared.items():
        generator = initial_generator(seed, parameter.stream or parameter.tie or name)
        values = parameter.draw(generator, parameter.shape)
        target = buffer[name]
        if arrays.is_device(target):
            arrays.upload(values.astype(target.dtype, "C"), out=target)
        else:
            target[...] = values


def decay_ranges(
    offsets: Mapping[str, int], decays: Mapping[str, bool], end: int
) -> list[tuple[int, int, bool]]:
    """Cut a flat buffer of `end` elements into the longest (start, stop, decay) of equal decay.

    Offsets are in the order of memory. A gap goes with what is before it, or with the first one.
    """
    ranges: list[tuple[int, int, bool]] = []
    later = list(offsets.values())[1:]
    for name, start, stop in zip(offsets, [0, *later], [*later, end]):
        decay = decays[name]
        if ranges and (ranges[-1][2] == decay or start == stop):
            ranges[-1] = (ranges[-1][0], stop, ranges[-1][2])
        elif start < stop:
            ranges.append((start, stop, decay))
    return ranges


def memory_order(declared: Mapping[str, Parameter]) -> list[str]:
    """Return names as they lie in memory: with decay, without, tied, tied again.

    The last are ties within one stage. So there are few ranges of equal decay, and what a pipeline
    shares lies at the end.
    """
    ranks: dict[str, tuple[int, bool]] = {}
    ties: set[str] = set()
    for name, parameter in declared.items():
        rank = 0
        if parameter.tie is not None:
            rank = 1
            if parameter.tie in ties:
                rank = 2
            ties.add(parameter.tie)
        ranks[name] = rank, not parameter.decay
    return sorted(declared, key=ranks.__getitem__)


# -- Frozen parameters, and the buffers in which they lie: apart, so that `flat` is what is trained
#
#     parameters   | trained ...        |   frozen   | frozen ... |
#     gradients    | of the trained ... |


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Return True if the last pattern that fits a name freezes it; `!` keeps it trained."""
    for pattern in reversed(patterns):
        if fnmatchcase(name, pattern.removeprefix("!")):
            return not pattern.startswith("!")
    return False


def frozen_names(declared: Mapping[str, Parameter], patterns: Sequence[str]) -> set[str]:
    """Return the names of frozen parameters; raise ArgumentError for ties frozen in part."""
    frozen = set()
    trained: dict[str, list[str]] = {}  # places of ties
    for name, parameter in declared.items():
        if parameter.frozen or is_frozen(name, patterns):
            frozen.add(name)
        elif parameter.tie is not None:
            trained.setdefault(parameter.tie, []).append(name)
    for name in frozen:
        tie = declared[name].tie
        if tie in trained:
            raise partly_frozen_error(tie, trained[tie])
    return frozen


def partly_frozen_error(key: str, trained: Collection[str]) -> ArgumentError:
    """Make the error for a tied parameter that is frozen in some of its places only."""
    return ArgumentError(
        f"the tied parameter {key!r} is frozen in some of its places only",
        found=f"{', '.join(trained)} is trained",
        expected="all places frozen, or none: they are one parameter",
        remedy="freeze both: a pattern for each place, or none for either",
    )


class StageBuffers:
    """The arrays of a stage: flat ones of what is trained, and others for frozen parameters.

    Parameters, and their gradients, have the dtype `wide`; layers compute in `dtype`.

    A pipeline sets what ties change: `owners` are (stage, name) where a parameter lies, if that is
    in other buffers or under another name; `parts` what its layer adds to, in place of the gradient
    there; `tied_copies` the names of parameters that norms count elsewhere.

    Attributes
    ----------
    parameters, compute : FlatBuffer
        All parameters by name; `.flat` is what is trained, for frozen ones lie elsewhere. Layers
        compute with `compute`: `parameters` itself, or its copy in a half dtype.
    gradients : FlatBuffer
        Gradients of what is trained, with the offsets of `parameters`.
    frozen : set of str
        Names of the parameters that stay as they are.
    frozen_parameters, frozen_compute : FlatBuffer
        Their arrays, and what layers compute with.
    decay_ranges : list of (int, int, bool)
        (start, stop, decay) ranges of the flat buffers.
    gpu : int or None
        Number of the GPU with the arrays; None on the host.
    merged : dict of str to (Layer, array)
        The layers with adapters, by the name of a matrix, and its sum with them.
    optimizer_writes, written : bool
        Whether only optimizers write `compute`, and have since the adapters were last merged.
    """

    def __init__(
        self,
        declared: Mapping[str, Parameter],
        frozen: Collection[str],
        wide: np.dtype,
        dtype: np.dtype,
        device: str,
        seed: int,
    ):
        trained: dict[str, Parameter] = {}
        rest: dict[str, Parameter] = {}
        for name, parameter in declared.items():
            (rest if name in frozen else trained)[name] = parameter

        def made(kind: np.dtype, some: Mapping[str, Parameter]) -> FlatBuffer:
            shapes = {name: parameter.shape for name, parameter in some.items()}
            return FlatBuffer(shapes, kind, device, dtype, memory_order(some))

        self.parameters = self.compute = made(wide, trained)
        draw_into(self.parameters, trained, seed)
        self.gradients = made(wide, trained)
        self.frozen = {*rest}
        self.frozen_parameters = self.frozen_compute = made(wide, rest)
        draw_into(self.frozen_parameters, rest, seed)
        if wide != dtype:
            self.compute = made(dtype, trained)
            self.frozen_compute = made(dtype, rest)
            _show(self.compute, self.frozen_compute, declared)
        decays = {name: parameter.decay for name, parameter in trained.items()}
        end = self.parameters.flat.size
        self.decay_ranges = decay_ranges(self.parameters.offsets, decays, end)
        _show(self.parameters, self.frozen_parameters, declared)
        self.gpu = None
        if device == "cuda":
            self.gpu = arrays.current_gpu()
        self.merged: dict[str, tuple[Any, Array]] = {}
        self.optimizer_writes = False
        self.written = False
        self.owners: dict[str, tuple[Any, str]] = {}
        self.parts: dict[str, Array] = {}
        self.tied_copies: set[str] = set()

    @property
    def has_copy(self) -> bool:
        """Whether layers compute with a copy of the parameters in a half dtype."""
        return self.compute is not self.parameters

    @property
    def all(self) -> list[FlatBuffer]:
        """All buffers."""
        buffers = [*self._trained, self.frozen_parameters]
        if self.has_copy:
            buffers.append(self.frozen_compute)
        return buffers

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(buffer.whole.nbytes for buffer in self.all)

    @property
    def _trained(self) -> list[FlatBuffer]:
        buffers = [self.parameters, self.gradients]
        if self.has_copy:
            buffers.append(self.compute)
        return buffers

    def ends_with(self, name: str) -> bool:
        """Return whether the array of this name is the last one of `parameters.flat`."""
        offsets = self.parameters.offsets
        return name in offsets and offsets[name] == max(offsets.values())

    def give_up(self, name: str) -> Array:
        """Let `flat` end before its last array everywhere; return its gradient.

        The memory stays allocated: to free it, all other arrays would have to move away from those
        who hold them.
        """
        gradient = self.gradients[name]
        for buffer in self._trained:
            buffer.flat = buffer.flat[: buffer.offsets.pop(name)]
        end = self.parameters.flat.size
        ranges = []
        for start, stop, decay in self.decay_ranges:
            if start < end:
                ranges.append((start, min(stop, end), decay))
        self.decay_ranges = ranges
        return gradient

    def point(self, name: str, other: StageBuffers, key: str) -> None:
        """Let a name be another name of an array of a stage.

        Parameters
        ----------
        name : str
            The name here.
        other, key : StageBuffers, str
            The buffers that have the array, and its name there.
        """
        for buffer, storage in zip(self._trained, other._trained):
            buffer._views[name] = None
            buffer._elsewhere[name] = (storage, key)
            buffer.offsets.pop(name, None)
            if buffer is storage:
                buffer.offsets[name] = storage.offsets[key]


def _show(buffer: FlatBuffer, other: FlatBuffer, order: Iterable[str]) -> None:
    """Show the arrays of another buffer next to those of this one, in this order of names."""
    views = {**buffer, **other}
    buffer._views = {name: views[name] for name in order}
