"""The state of an optimizer in shares: each replica updates one share of the parameters.

    replica 0   gradients whole | update share 0 | share 0 -->  --> parameters whole
    replica 1   gradients whole | update share 1 | share 1 -->  --> parameters whole

This is the first stage of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training
trillion parameter models", 2020). Gradients are summed as ever, and whole on each replica: so
norms, clipping and the sums of tied parameters have the bits that they have without shares, for any
number of replicas. An element of the parameters is updated by one replica
and copied to the others. So all have the bits of an optimizer without shares.

A stage that computes with a copy in a half dtype has no other use for its parameters in float32:
each replica keeps its share of these originals alone, and the copy is what is sent. Stages with
adapters keep them, for sums with these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import ALIGNMENT, Array, Shape
from mpipipe.comm import AllGather
from mpipipe.errors import ArgumentError
from mpipipe.even_split import even_split
from mpipipe.job import Communicator, RankGroup, group_of
from mpipipe.nn import Stage, announce_write, divide_buffer, kernels, unite_buffer
from mpipipe.stages import PipelineStage

Range: TypeAlias = tuple[int, int]

DIFFER = "the replicas of an optimizer differ"
SAMPLE = 256  # elements


class Shards:
    """The shares of the replicas in the flat parameters of stages; made collectively."""

    def __init__(self, replicas: Communicator, stages: Sequence[PipelineStage]) -> None:
        self.group = group_of(replicas)
        self.flats = _flats(stages)
        # Names belong to the facts, since two stages of one shape are no replicas.
        facts = []
        for flat, stage in zip(self.flats, stages):
            shapes = {name: gradient.shape for name, gradient in stage.gradients.items()}
            facts.append((flat, getattr(stage, "dtype", None), stage.index, shapes))
        self.group.agree(
            "optim: the parameters that replicas share",
            (("parameters of the stages", str(facts)),),
            message=DIFFER,
            remedy="give it the ranks with the same stages, such as mesh.replicas",
        )
        # A share for each replica, at multiples of 64 elements.
        self.ranges: list[list[Range]] = []
        for stage in stages:
            size = stage.gradients.flat.size
            shares = []
            for block in even_split(-(-size // ALIGNMENT), self.group.size):
                stop = min(size, ALIGNMENT * block.stop)
                shares.append((min(size, ALIGNMENT * block.start), stop))
            self.ranges.append(shares)
        self.stages = list(stages)
        # The share of this replica, for stages whose originals are not whole here.
        self.originals: list[Array | None] = [None] * len(stages)
        self._underway: list[AllGather] = []
        self._is_first_step = True
        self._divide()

    def share_of(self, number: int) -> Range:
        """Return this replica's share of the stage of this number."""
        return self.ranges[number][self.group.rank]

    @contextmanager
    def step(self, **numbers: object) -> Iterator[None]:
        """Within this context replicas step from equal parameters, gradients, numbers; collective.

        Replicas that differ would have equal parameters after it, each share from another replica,
        and nothing later would find that. So a sample of parameters and gradients is compared
        before; on GPUs, which it lets the host wait for, in the first step alone.
        """
        error = None
        now = _flats(self.stages)
        if now != self.flats:
            error = ArgumentError(
                "the parameters of a sharded optimizer are others than at its construction",
                found=", ".join(now),
                expected=", ".join(self.flats),
                remedy="build the pipeline first, and then the optimizer: it lets tied parameters "
                "share storage",
            )
        of_parameters = 0.0
        of_gradients = 0.0
        for number, stage in enumerate(self.stages):
            if self._is_first_step or not arrays.is_device(stage.gradients.flat):
                of_parameters += _sample(self._exchanged(number)[0])
                of_gradients += _sample(stage.gradients.flat)
        self._is_first_step = False
        numbers["sum of a sample of the parameters"] = of_parameters
        numbers["sum of a sample of the gradients"] = of_gradients
        self.group.agree(
            "optim: a step over the replicas",
            tuple(numbers.items()),
            error=error,
            message=DIFFER,
            remedy="give Pipeline the same replicas, which sums gradients over them, and change "
            "parameters, gradients and learning rates on all of them alike",
        )
        with self._exchange("a step of a sharded optimizer"):
            yield
        for stage, original, ranges in zip(self.stages, self.originals, self.ranges):
            copy = stage.kept_copy
            if original is None and copy is not None:
                for start, stop in self._others(ranges):
                    stage.kernels.copy(stage.parameters.flat[start:stop], copy[start:stop])

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        """Wait at the end for all that has begun within this context."""
        with self.group.failing(what):
            try:
                yield
                for pending in self._underway:
                    self.group.wait(pending, "the parameters of the other replicas")
            except BaseException:
                for pending in self._underway:
                    pending.Cancel()
                raise
            finally:
                self._underway = []

    def _exchanged(self, number: int) -> tuple[Array, list[Range]]:
        """Return what is whole on each replica between two steps, and the ranges of shares in it.

        Halves are seen as int32, which MPI knows.
        """
        stage = self.stages[number]
        ranges = self.ranges[number]
        if self.originals[number] is None:
            return stage.parameters.flat, ranges
        pairs = _model(stage).compute.flat.view(np.int32)
        return pairs, [(start // 2, stop // 2) for start, stop in ranges]

    def give(self, number: int) -> None:
        """Begin to give this replica's share of the parameters to the others, and to get theirs."""
        self._gather(*self._exchanged(number))

    def _gather(self, flat: Array, ranges: list[Range]) -> None:
        if flat.size:
            self._underway.append(AllGather(self.group.comm, flat, ranges))

    def _others(self, ranges: list[Range]) -> list[Range]:
        return [*ranges[: self.group.rank], *ranges[self.group.rank + 1 :]]

    # -- originals in float32 of stages that compute in a half dtype

    def _divide(self) -> None:
        """Keep this replica's share of the originals alone, where they are whole."""
        with self.group.failing("the shares of a sharded optimizer"):
            for number, stage in enumerate(self.stages):
                originals = stage.originals
                if originals is None or originals.is_divided or not originals.flat.size:
                    continue
                announce_write(stage)  # a save may read them
                _model(stage).optimizer_writes_compute()
                stage.sync_compute()
                share = arrays.copy(originals.flat[slice(*self.share_of(number))])
                self.originals[number] = share
                shards = {}
                for name, start in originals.offsets.items():
                    copy = _model(stage).compute[name]
                    shards[name] = self.shard(number, start, copy, share, copy)
                divide_buffer(originals, share, shards)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within this context the originals are whole on all replicas; collective."""
        wholes = {}
        with self._exchange("the whole parameters of a sharded optimizer"):
            for number, share in enumerate(self.originals):
                if share is not None:
                    whole = wholes[number] = arrays.empty_like(self.stages[number].gradients.flat)
                    arrays.copy_into(whole[slice(*self.share_of(number))], share)
                    self._gather(whole, self.ranges[number])
        for number, whole in wholes.items():
            unite_buffer(_model(self.stages[number]).parameters, whole)
            self.originals[number] = None
        try:
            yield
        finally:
            if wholes:
                self._divide()

    def shard(
        self, number: int, start: int, like: Array, state: Array, copy: Array | None = None
    ) -> StateShard:
        """Return this replica's part of the state of a parameter that starts here in its stage."""
        parts = np.clip(np.subtract(self.ranges[number], start), 0, like.size).tolist()
        first, last = parts[self.group.rank]
        begin = start - self.share_of(number)[0]
        part = state[begin + first : begin + last]  # both ends are equal where it has none
        return StateShard(like.shape, state.dtype, part, parts, self.group, copy)


def _model(stage: PipelineStage) -> Stage:
    """Return a stage with originals, which is an nn.Stage."""
    (model,) = stage.inner_stages
    return model


def _flats(stages: Sequence[PipelineStage]) -> list[str]:
    texts = []
    for stage in stages:
        flat = stage.gradients.flat
        texts.append(f"{flat.dtype.name}[{flat.size}]")
    return texts


def _sample(flat: Array) -> float:
    """Return the sum of some elements, the same ones on all replicas; NaN where one is NaN."""
    step = -(-flat.size // SAMPLE) or 1
    values: list[float] = arrays.download(flat[::step].copy()).tolist()
    return sum(values)


@dataclass(frozen=True)
class StateShard:
    """The part of an array of a sharded optimizer that one replica has.

    That is its state, and parameters in float32 of stages that compute with a copy in a half dtype.

    Attributes
    ----------
    shape, dtype : tuple of int, numpy.dtype
        Of the whole array.
    part : array
        A view (elements,) of the state: a range of the flattened array, which may be empty.
    ranges : list of (int, int)
        The ranges of all replicas.
    group : RankGroup
        The replicas.
    copy : array or None
        The full half-precision parameters, which every replica keeps. None for other state.
    """

    shape: Shape
    dtype: np.dtype
    part: Array = field(repr=False)
    ranges: list[Range]
    group: RankGroup = field(repr=False)
    copy: Array | None = field(repr=False, default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """Put the whole array together on the host; collective over the replicas.

        Returns
        -------
        numpy.ndarray
            A copy.
        """
        flat = np.empty(math.prod(self.shape), self.dtype)
        start, stop = self.ranges[self.group.rank]
        what = "the shares of a sharded optimizer"
        with self.group.failing(what):
            flat[start:stop] = arrays.download(self.part)
            if flat.size:
                pending = AllGather(self.group.comm, flat, self.ranges)
                self.group.wait(pending, what)
        return flat.reshape(self.shape)

    def take(self, whole: np.ndarray) -> None:
        """Set this replica's part, and the copy, from the whole array.

        Parameters
        ----------
        whole : numpy.ndarray
            On the host, of `shape` and `dtype`.
        """
        flat = np.ascontiguousarray(whole).reshape(-1)
        placed: Any = np.asarray
        if arrays.is_device(self.part):
            placed = arrays.upload
        arrays.copy_into(self.part, placed(flat[slice(*self.ranges[self.group.rank])]))
        if self.copy is not None:
            kernels.of_array(self.copy).copy(placed(flat), self.copy.reshape(-1))
