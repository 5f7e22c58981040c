"""The state of an optimizer over replicas: each one keeps it for a share of the parameters, and updates that share.

    replica 0   gradients whole | update share 0 | share 0 -->  --> parameters whole
    replica 1   gradients whole | update share 1 | share 1 -->  --> parameters whole

This is the first stage of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
models", 2020). Gradients are summed as ever, and whole on each replica: so norms, clipping and the sums of tied
parameters have the bits that they have without shares, for any number of replicas, and by MPI as by NCCL. An element of
the parameters is updated by one replica and copied to the others. So all have the bits of an optimizer without shares.
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
from mpipipe.comm import AllGather, NcclSums, agree_on_nccl
from mpipipe.errors import ArgumentError
from mpipipe.even_split import even_split
from mpipipe.job import Communicator, RankGroup, ReplicaSum, cached, group_of
from mpipipe.optim.norm import gpu_of
from mpipipe.stages import StageAdapter

Range: TypeAlias = tuple[int, int]

DIFFER = "the replicas of an optimizer differ"
SAMPLE = 256  # elements


def shares_of(size: int, replicas: int) -> list[Range]:
    """Cut a flat buffer into a share for each replica; each begins at the edge of a block of 64 elements."""
    blocks = even_split(-(-size // ALIGNMENT), replicas)
    return [(min(size, ALIGNMENT * block.start), min(size, ALIGNMENT * block.stop)) for block in blocks]


class Shards:
    """The share of each replica of the flat parameters of each stage; the constructor is collective over them.

    `error` is why this rank has none: all replicas raise it.
    """

    def __init__(self, replicas: Communicator, stages: Sequence[StageAdapter], error: Exception | None) -> None:
        self.group, self.flats = group_of(replicas), _flats(stages)
        # with names: two stages of one shape are no replicas
        facts = [
            (flat, stage.index, {name: array.shape for name, array in stage.parameters.items()})
            for flat, stage in zip(self.flats, stages)
        ]
        self.group.agree(
            "optim: the parameters that replicas share",
            (("parameters of the stages", str(facts)),),
            error=error,
            message=DIFFER,
            remedy="give it the ranks with the same stages, such as mesh.replicas",
        )
        self.ranges = [shares_of(stage.parameters.flat.size, self.group.size) for stage in stages]
        self._underway: list[tuple[ReplicaSum, StageAdapter, list[Range]]] = []
        self._first = True  # step
        self._nccl: NcclSums | None = None
        if agree_on_nccl([self.group], "cpu" if gpu_of(stages) is None else "cuda").sums:
            self._nccl = cached(replicas, "optim: parameters by NCCL", lambda: NcclSums(self.group))

    def own(self, number: int) -> Range:
        """Return this replica's share of the stage of this number."""
        return self.ranges[number][self.group.rank]

    @contextmanager
    def step(self, stages: Sequence[StageAdapter], **numbers: Any) -> Iterator[None]:
        """Within this context replicas make a step, from equal parameters, gradients and numbers; collective.

        Replicas that differ would have equal parameters after it, each share from another replica, and nothing later
        would find that. So a sample of parameters and gradients is compared before; on GPUs, which it lets the host
        wait for, in the first step alone.
        """
        now, error = _flats(stages), None
        if now != self.flats:
            error = ArgumentError(
                "the parameters of a sharded optimizer are others than at its construction",
                found=", ".join(now),
                expected=", ".join(self.flats),
                remedy="build the pipeline first, and then the optimizer: it lets tied parameters share storage",
            )
        sampled = [stage for stage in stages if self._first or not arrays.is_device(stage.parameters.flat)]
        self._first = False
        for name in ("parameters", "gradients"):
            numbers[f"sum of a sample of the {name}"] = sum(_sample(getattr(stage, name).flat) for stage in sampled)
        self.group.agree(
            "optim: a step over the replicas",
            tuple(numbers.items()),
            error=error,
            message=DIFFER,
            remedy="give Pipeline the same replicas, which sums gradients over them, and change parameters, gradients "
            "and learning rates on all of them alike",
        )
        with self.group.failing("a step of a sharded optimizer"):
            try:
                yield
                self._wait()
            except BaseException:
                for pending, _, _ in self._underway:
                    pending.Cancel()
                raise
            finally:
                self._underway = []

    def give(self, number: int, stage: StageAdapter) -> None:
        """Begin to give this replica's share of the parameters to the others, and to get theirs."""
        flat, ranges = stage.parameters.flat, self.ranges[number]
        if not flat.size:
            return
        if self._nccl is None:
            pending: ReplicaSum = AllGather(self.group.comm, flat, ranges)
        else:  # bits plus zeros are these bits, as integers and in any order: so NCCL need not gather, it adds
            for start, stop in self._others(ranges):
                arrays.set_zero(flat[start:stop])
            pending = self._nccl.start(flat.view(np.int32))
        self._underway.append((pending, stage, ranges))

    def _others(self, ranges: list[Range]) -> list[Range]:
        return [*ranges[: self.group.rank], *ranges[self.group.rank + 1 :]]

    def _wait(self) -> None:
        """Wait for the parameters of all replicas, and round what is new to the copy in a half dtype, if any."""
        for pending, stage, ranges in self._underway:
            self.group.wait(pending, "the parameters of the other replicas", everyone=True)
            flat, copy = stage.parameters.flat, stage.kept_copy
            if copy is not None:
                for start, stop in self._others(ranges):
                    stage.kernels.cast(flat[start:stop], copy[start:stop])

    def shard(self, number: int, start: int, like: Array, state: Array) -> StateShard:
        """Return this replica's part of the state of one parameter, which starts here in the flat one of its stage."""
        parts = [(min(max(a - start, 0), like.size), min(max(b - start, 0), like.size)) for a, b in self.ranges[number]]
        (first, last), begin = parts[self.group.rank], start - self.own(number)[0]
        part = state[begin + first : begin + last] if first < last else state[:0]
        return StateShard(like.shape, state.dtype, part, parts, self.group)


def _flats(stages: Sequence[StageAdapter]) -> list[str]:
    return [f"{stage.parameters.flat.dtype.name}[{stage.parameters.flat.size}]" for stage in stages]


def _sample(flat: Array) -> float:
    """Return the sum of some elements, the same ones on all replicas: NaN for any NaN, whose bits MPI may change."""
    values: list[float] = arrays.download(flat[:: -(-flat.size // SAMPLE) or 1].copy()).tolist()
    return sum(values)


@dataclass(frozen=True)
class StateShard:
    """What one replica has of an array of a sharded optimizer's state; all replicas together have the array.

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
    """

    shape: Shape
    dtype: np.dtype
    part: Array = field(repr=False)
    ranges: list[Range]
    group: RankGroup = field(repr=False)

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
        with self.group.failing("the state of the optimizer"):
            flat[start:stop] = arrays.download(self.part)
            if flat.size:
                pending = AllGather(self.group.comm, flat, self.ranges)
                self.group.wait(pending, "the state of the optimizer on the other replicas", everyone=True)
        return flat.reshape(self.shape)

    def take(self, whole: np.ndarray) -> None:
        """Set this replica's part from the whole array.

        Parameters
        ----------
        whole : numpy.ndarray
            On the host, of `shape` and `dtype`.
        """
        start, stop = self.ranges[self.group.rank]
        values = np.ascontiguousarray(whole.reshape(-1)[start:stop])
        arrays.copy_into(self.part, arrays.upload(values) if arrays.is_device(self.part) else values)
