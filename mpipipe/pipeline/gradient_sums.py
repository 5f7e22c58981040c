"""Sums of gradients over the replicas: when they start, and in which order.

    compute      last backward of a stage:   | layer 3 | layer 2 | layer 1 | layer 0 |
    NCCL                                              | bucket 0 | bucket 1 |    bucket 2 |

By NCCL they start bucket by bucket while the last backward of the stage (or its last weight gradient) goes on, as its
layers end. That needs an `nn.Stage` with layers of this package on a GPU, and the same order of buckets on all
replicas, which they agree on. All other sums start when the last backward of their stage has ended.

In calls whose messages do not go by NCCL, while sums do, all sums start when the last message of the rank has ended. A
message that the host moves on piece by piece might come to stand behind a sum otherwise, which waits for another rank.

Sums and messages have one order (see comm/transport/nccl.py). In it, all buckets of a stage stand where the action ends
that completes its gradients. Buckets that are complete before this action ends come before its message. The bucket
that the first layer completes comes behind the message, since another rank waits for the message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from mpipipe.arrays import Array
from mpipipe.comm.allreduce import AllReduce
from mpipipe.comm.mailbox import Mailbox
from mpipipe.comm.nccl import sums
from mpipipe.comm.nccl.sums import NcclSums
from mpipipe.job.group import Group
from mpipipe.job.types import ReplicaSum
from mpipipe.nn import Layer, Stage
from mpipipe.nn.write_hooks import GradientReady, gradient_ready
from mpipipe.pipeline.plan import PlannedAction
from mpipipe.stages import StageAdapter


class ByLayers(NamedTuple):
    """A stage whose sums start as its layers end."""

    model: Stage
    ready: GradientReady
    buckets: list[Bucket]

    @property
    def is_current(self) -> bool:
        """Whether the gradients are where they were: a later pipeline may let parameters share their storage."""
        return self.model.gradients.flat is self.ready.arrays[0].array


class GradientSums:
    """The sums of one rank's gradients over the replicas; the constructor is collective over them.

    Parameters
    ----------
    replicas : group of the ranks with the same stages
    nccl : their sums by NCCL, or None
    mailbox : whose receives come before a sum
    stages : of this rank, with tied parameters where they are to be

    Attributes
    ----------
    underway : sums that this call has started
    """

    def __init__(self, replicas: Group, nccl: NcclSums | None, mailbox: Mailbox, stages: Sequence[StageAdapter]):
        self.replicas, self.nccl, self.mailbox, self.stages = replicas, nccl, mailbox, stages
        self.underway: list[ReplicaSum] = []
        self._by_layers = [None] * len(stages) if nccl is None else self._agree(nccl)
        self._left: deque[Bucket] = deque()  # of the backward under way
        self._put_off: list[PlannedAction] | None = None  # whose sums start when the last message has ended

    def _agree(self, nccl: NcclSums) -> list[ByLayers | None]:
        found = [_by_layers(stage, nccl) for stage in self.stages]
        mine = [None if each is None else each.buckets for each in found]
        everyone = self.replicas.gather("the order of sums over the replicas", mine)
        return [
            each if all(buckets[chunk] == mine[chunk] for buckets in everyone) else None
            for chunk, each in enumerate(found)
        ]

    def by_layers(self, chunk: int) -> ByLayers | None:
        """How the sums of a stage start as its layers end; None if they start behind its last backward."""
        found = self._by_layers[chunk]
        return found if found is not None and found.is_current else None

    def begin(self) -> None:
        """Begin a call, once it is known how its messages travel."""
        self.underway = []
        mailbox = self.mailbox
        alone = mailbox.group is None or mailbox.group.size == 1
        self._put_off = None if self.nccl is None or alone or not mailbox.waits_on_host() else []

    def watch(self, step: PlannedAction) -> None:
        """Before the action that completes a stage's gradients: let its layers tell when they have ended."""
        found = self.by_layers(step.chunk)
        if found is not None and self._put_off is None:
            self._left = deque(found.buckets)
            found.model.on_layer_done = partial(self._ended, step, found)

    def _ended(self, step: PlannedAction, found: ByLayers, layer: Layer) -> None:
        """Start the sums of what is complete now that a layer has ended, unless it is the first one."""
        place = found.ready.places[layer]
        if place:
            self._start_until(step, found, place)

    def complete(self, step: PlannedAction) -> None:
        """Behind that action: start the sums that are left of the stage, or all of them."""
        if self._put_off is None:
            self._start_all(step)
        else:
            self._put_off.append(step)

    def _start_all(self, step: PlannedAction) -> None:
        """Start the sums that are left of a stage: the same ones in the same order, whenever that is."""
        found = self.by_layers(step.chunk)
        if found is not None:
            if found.model.on_layer_done is None:
                self._left = deque(found.buckets)
            found.model.on_layer_done = None
            self._start_until(step, found, 0)
            return
        self.mailbox.start_before(step.order_key)
        for gradients in self.stages[step.chunk].gradient_arrays:
            self.underway.append(self._start(gradients))

    def _start_until(self, step: PlannedAction, found: ByLayers, place: int) -> None:
        """Start the sums of the buckets that are complete when the layer at `place` has ended."""
        while self._left and self._left[0].place >= place:
            self.mailbox.start_before(step.order_key)
            bucket = self._left.popleft()
            self.underway.append(self._start(found.ready.arrays[bucket.array].array[bucket.start : bucket.stop]))

    def _start(self, gradients: Array) -> ReplicaSum:
        if self.nccl is not None and self.nccl.takes(gradients):
            return self.nccl.start(gradients)
        self.replicas.settle()  # whether they make this step, too
        return AllReduce(self.replicas.comm, gradients)

    def finish(self) -> None:
        """Start the sums that were put off, and wait for all of this call; its messages have ended."""
        put_off, self._put_off = self._put_off, None
        for step in put_off or ():
            self._start_all(step)
        for pending in self.underway:
            self.replicas.wait(pending, "the sum of gradients over the replicas", everyone=True)

    def progress(self) -> None:
        """Let the sums advance; never waits."""
        if self.underway:
            self.underway[0].progress()


def _by_layers(stage: StageAdapter, nccl: NcclSums) -> ByLayers | None:
    """How the sums of a stage can start as its layers end, as far as this rank knows."""
    ready = gradient_ready(stage.given) if type(stage.given) is Stage else None
    if ready is None or not nccl.takes(ready.arrays[0].array):
        return None
    count = max(1, sums.BUCKET_BYTES // ready.arrays[0].array.itemsize)
    return ByLayers(stage.models[0], ready, cut([each.pieces for each in ready.arrays], count))


# -- Gradients cut into buckets, in the order in which the layers of a stage complete them ----------------------------
#
#     layer        0     1     2          | 0 1 2 |
#     matrices     |-----|-----|-----|    |-------|  gains and biases
#     bucket          2     1     0           3
#
# A backward goes from the last layer to the first. A bucket is complete when the first of its layers has ended. So
# it is cut from the end of the buffer, where it can at the edge of a layer, and what holds pieces of all layers
# stands apart.


class Bucket(NamedTuple):
    """A range of one array of gradients; `place` is that of the layer whose end completes it."""

    array: int
    start: int
    stop: int
    place: int


def cut(arrays: Sequence[Sequence[tuple[int, int]]], count: int) -> list[Bucket]:
    """Return the buckets of some arrays, those first that are complete first.

    Parameters
    ----------
    arrays : for each array its pieces, (where it ends, place of the layer that writes to it), in the order of memory
    count : most elements of a bucket
    """
    buckets = []
    for array, pieces in enumerate(arrays):
        for run in _rising(pieces):
            buckets += [Bucket(array, *bucket) for bucket in _cut_run(run, count)]
    return sorted(buckets, key=lambda bucket: (-bucket.place, bucket.array, -bucket.stop))


def _rising(pieces: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """Pieces as (start, stop, place), in longest runs of consecutive ones whose places do not fall."""
    runs: list[list[tuple[int, int, int]]] = []
    start, before = 0, -1
    for stop, place in pieces:
        if not runs or place < before:
            runs.append([])
        runs[-1].append((start, stop, place))
        start, before = stop, place
    return runs


def _cut_run(run: Sequence[tuple[int, int, int]], count: int) -> list[tuple[int, int, int]]:
    """(start, stop, place) of buckets of at most `count` elements, from the last to the first.

    A bucket begins at the edge of a layer where that leaves it half of `count` at least.
    """
    first, stop = run[0][0], run[-1][1]
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
