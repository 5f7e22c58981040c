"""Sums of gradients over the replicas: when they start, and in which order.

    compute      last backward of a stage:   | layer 3 | layer 2 | layer 1 | layer 0 |
    NCCL                                              | bucket 0 | bucket 1 |    bucket 2 |

By NCCL they start bucket by bucket while the last backward of the stage (or its last weight
gradient) goes on, as its layers end. That needs an `nn.Stage` with layers of this package on a GPU,
and the same order of buckets on all replicas, which they agree on. All other sums start when the
last backward of their stage has ended.

In a pipeline of several ranks all sums by NCCL start when the last message of the rank has ended. A
message that the host moves on piece by piece might come after a sum otherwise, which waits for
another rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.comm import AllReduce, NcclSums
from mpipipe.comm.nccl import sums
from mpipipe.job import RankGroup, ReplicaSum
from mpipipe.nn import GradientReady, Layer, Stage, gradient_ready, kernels
from mpipipe.pipeline.attached import AttachedStage
from mpipipe.pipeline.check import Checks
from mpipipe.pipeline.ties import Ties


class LayerBuckets:
    """The buckets of a stage, in the order in which its layers complete them."""

    def __init__(self, model: Stage, ready: GradientReady) -> None:
        # which gradients are ready once a layer has ended
        self.model = model
        self.ready = ready
        count = max(1, sums.BUCKET_BYTES // ready.arrays[0].array.itemsize)
        self.buckets = cut([gradients.pieces for gradients in ready.arrays], count)
        # Buckets whose sums have not started.
        self.left: deque[Bucket] = deque()

    def take(self, place: int) -> Iterator[Array]:
        """Take the buckets that are left and complete once the layer at `place` has ended."""
        while self.left and self.left[0].place >= place:
            bucket = self.left.popleft()
            yield self.ready.arrays[bucket.array].array[bucket.start : bucket.stop]


class GradientSums:
    """The sums of one rank's gradients over the replicas.

    The constructor and `close` are collective over the replicas.

    `messages` is True where the pipeline has other ranks, which send this one messages.
    """

    def __init__(
        self,
        replicas: RankGroup,
        nccl: NcclSums | None,
        messages: bool,
        stages: Sequence[AttachedStage],
    ):
        self.replicas = replicas
        self.nccl = nccl
        self.stages = stages
        # Sums that this call has started.
        self.underway: list[ReplicaSum] = []
        self._by_layers: list[LayerBuckets | None] = [None] * len(stages)
        self._postpones = nccl is not None and messages
        self._postponed: list[int] = []  # chunks whose sums start when the last message has ended
        # Sums start by layers as far as all replicas have the same buckets.
        if nccl is not None and not messages:
            for chunk, stage in enumerate(stages):
                model = stage.layers
                ready = None if model is None else gradient_ready(model)
                if model is not None and ready is not None and nccl.takes(ready.arrays[0].array):
                    self._by_layers[chunk] = LayerBuckets(model, ready)
            mine = [buckets and buckets.buckets for buckets in self._by_layers]
            everyone = replicas.gather("the order of sums over the replicas", mine)
            for chunk, own in enumerate(mine):
                if any(other[chunk] != own for other in everyone):
                    self._by_layers[chunk] = None

    def by_layers(self, chunk: int) -> LayerBuckets | None:
        """Return the buckets whose sums start as layers end; None if they start later.

        So they do where the gradients are elsewhere by now: a later pipeline may let parameters
        share their storage.
        """
        buckets = self._by_layers[chunk]
        moved = buckets is None or buckets.model.gradients.flat is not buckets.ready.arrays[0].array
        return None if moved else buckets

    def begin(self) -> None:
        """Begin a call."""
        self.underway = []
        self._postponed = []

    def watch(self, chunk: int) -> None:
        """Let the sums of a stage's layers start as these end, in its last action."""
        buckets = self.by_layers(chunk)
        if buckets is not None:
            buckets.left = deque(buckets.buckets)
            buckets.model.on_layer_done = partial(self._layer_ended, buckets)

    def _layer_ended(self, buckets: LayerBuckets, layer: Layer) -> None:
        self._start(buckets.take(buckets.ready.places[layer]))

    def complete(self, chunk: int) -> None:
        """After that action: start the sums that are left of the stage."""
        if self._postpones:
            self._postponed.append(chunk)
        else:
            self._complete(chunk)

    def _complete(self, chunk: int) -> None:
        buckets = self.by_layers(chunk)
        if buckets is None:
            self._start(self.stages[chunk].gradient_arrays)
        else:
            buckets.model.on_layer_done = None
            self._start(buckets.take(0))

    def _start(self, gradients: Iterable[Array]) -> None:
        for array in gradients:
            if self.nccl is not None and self.nccl.takes(array):
                self.underway.append(self.nccl.start(array))
            else:
                self.underway.append(AllReduce(self.replicas.comm, array))

    def wait(self) -> None:
        """Start the sums that were postponed, and wait for all; messages have ended."""
        for chunk in self._postponed:
            self._complete(chunk)
        for pending in self.underway:
            self.replicas.wait(pending, "the sum of gradients over the replicas", everyone=True)

    def progress(self) -> None:
        if self.underway:
            self.underway[0].progress()

    def cancel(self) -> None:
        for pending in self.underway:
            pending.Cancel()
        if self.nccl is not None:
            self.nccl.abort()

    def close(self) -> None:
        if self.nccl is not None:
            self.nccl.close()


# -- All gradients of a training step: zeroed, summed over ties and replicas, added to earlier ones

Earlier = list[tuple[Array, Array]]  # (gradients, a copy of what was in them)


class StepGradients:
    """The gradients of the stages of one rank."""

    def __init__(
        self,
        stages: Sequence[AttachedStage],
        ties: Ties,
        sums: GradientSums | None,
        checks: Checks | None,
    ):
        self.stages = stages
        self.ties = ties
        self.sums = sums
        self.checks = checks

    @contextmanager
    def making(self, accumulate: bool) -> Iterator[Earlier]:
        """Let stages add to gradients that begin with zeros; sum them over ties at the end.

        To `accumulate`, a copy of the earlier gradients is given. They are sums already.
        """
        earlier: Earlier = []
        if accumulate:
            for stage in self.stages:
                for gradients in stage.stage.shown_gradients:
                    if not any(arrays.shares_memory(gradients, other) for other, _ in earlier):
                        earlier.append((gradients, arrays.copy(gradients)))
        try:
            for stage in self.stages:
                stage.begin_gradients()
            yield earlier
            self.ties.sum_gradients()
            if self.checks is not None:
                self.checks.look_at_sums()
        finally:
            for stage in self.stages:
                stage.leave_step()

    def wait(self) -> None:
        """Wait for the sums over replicas."""
        if self.sums is not None:
            self.sums.wait()

    def add(self, earlier: Earlier) -> None:
        """Add earlier gradients to those of the step."""
        for gradients, copy in earlier:
            kernels.of_array(gradients).accumulate(gradients, copy)

    def close(self) -> None:
        """Free what sums over replicas by NCCL need."""
        if self.sums is not None:
            self.sums.close()


# -- Gradients cut into buckets, in the order in which the layers of a stage complete them ---------
#
#     layer        0     1     2          | 0 1 2 |
#     matrices     |-----|-----|-----|    |-------|  gains and biases
#     bucket          2     1     0           3
#
# A backward goes from the last layer to the first. A bucket is complete when the first of its
# layers has ended. So it is cut from the end of the buffer, where it can at the edge of a layer,
# and what holds pieces of all layers stands apart.


class Bucket(NamedTuple):
    """A range of one array of gradients; `place` is that of the layer whose end completes it."""

    array: int
    start: int
    stop: int
    place: int


def cut(series: Sequence[Sequence[tuple[int, int]]], count: int) -> list[Bucket]:
    """Cut arrays into buckets of at most `count` elements, those first that are complete first.

    An array is given by its pieces in the order of memory: (where it ends, place of the layer that
    writes to it).
    """
    buckets = []
    for array, pieces in enumerate(series):
        for run in _rising(pieces):
            buckets += [Bucket(array, *bucket) for bucket in _cut_run(run, count)]
    return sorted(buckets, key=lambda bucket: (-bucket.place, bucket.array, -bucket.stop))


def _rising(pieces: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """Return pieces as (start, stop, place), in longest runs whose places do not fall."""
    runs: list[list[tuple[int, int, int]]] = []
    start = 0
    before = -1
    for stop, place in pieces:
        if not runs or place < before:
            runs.append([])
        runs[-1].append((start, stop, place))
        start = stop
        before = place
    return runs


def _cut_run(run: Sequence[tuple[int, int, int]], count: int) -> list[tuple[int, int, int]]:
    """(start, stop, place) of buckets of at most `count` elements, from the last to the first.

    A bucket begins at the edge of a layer where that leaves it half of `count` at least.
    """
    first = run[0][0]
    stop = run[-1][1]
    edges = [after[0] for before, after in pairwise(run) if before[2] < after[2]]
    buckets = []
    while stop > first:
        start = max(first, stop - count)
        edge = min((edge for edge in edges if start <= edge < stop), default=start)
        if 2 * (stop - edge) >= count:
            start = edge
        place = next(place for _, end, place in run if end > start)
        buckets.append((start, stop, place))
        stop = start
    return buckets
