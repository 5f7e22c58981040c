"""A pipeline that continues sequences of tokens: the layers of a model, each with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np

from mpipipe import nn
from mpipipe.attention.slot_cache import Piece, Pieces, SlotCache
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.pipeline import Pipeline
from mpipipe.train import limits, memory
from mpipipe.train.training_plan import TrainingPlan

LoadWeights = Callable[[Sequence[nn.Stage]], None]
Part = tuple[list[Piece], list[int]]  # the pieces of a micro-batch, and its tokens


class Decoder:
    """A pipeline of stages with caches, in whose slots sequences grow. A context manager, which closes the pipeline.

    Attributes
    ----------
    pipeline : Pipeline
    slots : number of sequences at once
    capacity : of tokens in each, prompt and answer
    microbatches : most of them in one forward
    first : whether this rank has the first stage, which takes the tokens
    drawing : rank of the mesh that has the logits, and draws for all
    """

    def __init__(self, pipeline: Pipeline, mesh: Mesh, held: list[list[Piece]], slots: int, capacity: int) -> None:
        placement = pipeline.schedule.placement
        self.pipeline, self.mesh, self.slots, self.capacity = pipeline, mesh, slots, capacity
        self.microbatches = pipeline.schedule.microbatches
        self.first, self.drawing = mesh.pipe.rank == placement[0], mesh.rank_of(placement[-1], 0, 0)
        self._held = held

    def forward(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Run a forward of one to `microbatches` micro-batches, the same on every rank; collective.

        Returns the logits behind each piece that asks for them, in order, each (vocab,), on the ranks of the last
        stage; none elsewhere.
        """
        self._held[:] = [pieces for pieces, _ in parts]
        inputs = [np.array([tokens], np.int64) for _, tokens in parts] if self.first else None
        outputs: Any = self.pipeline.forward(inputs)  # arrays, since the inputs are
        return [] if outputs is None else [row for output in outputs for row in output[0]]

    def __enter__(self) -> Decoder:
        self.pipeline.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pipeline.__exit__(kind, error, trace)


class DecodingStage:
    """A stage of a decoder: tells the caches what a micro-batch consists of, and skips what nobody asks for.

    Parameters
    ----------
    inner_stages : one nn.Stage; on the last rank another one with the last layer of the model alone
    pieces : that the caches of the first one read
    held : the pieces of each micro-batch of the forward under way
    """

    def __init__(self, inner_stages: list[nn.Stage], pieces: Pieces, held: list[list[Piece]]) -> None:
        self.inner_stages, self.pieces, self.held = inner_stages, pieces, held

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, None]:
        """Return hidden states, or from the last stage logits (1, pieces that ask for them, vocab)."""
        body, *head = self.inner_stages
        pieces = self.held[body.position.microbatch]
        self.pieces.begin(pieces)
        y, _ = body.forward(x)
        if not head:
            return y, None
        ends = np.cumsum([piece.rows for piece in pieces]) - 1
        asked = [end for end, piece in zip(ends, pieces) if piece.ends]
        if not asked:
            return y[:, :0], None
        return head[0].forward(np.ascontiguousarray(y[:, asked]))[0], None


def build_decoder(
    plan: TrainingPlan, mesh: Mesh, dtype: str, capacity: int, load_weights: LoadWeights, *, slots: int = 1
) -> Decoder:
    """Build a decoder of the model of a plan, with as many micro-batches in flight as its schedule has.

    Attention looks back over the last `plan.model.seq` positions in each layer, or over those of the layer's own window
    where that is shorter. Up to that length this is the model as it was trained. Beyond it, no distance occurs that the
    rotary positions did not have in training.

    Collective over the mesh. An error of `load_weights` is raised on every rank, and so is ConfigError if parameters
    and caches cannot fit into memory, and where learned positions are fewer than `capacity` - 1. The caller closes the
    decoder.

    Parameters
    ----------
    plan : model, cut and placement of stages; of its schedule the forwards count
    mesh : its `pipe` has the stages; the ranks of its `seq` share the caches
    dtype : of parameters and caches, float32 or float64; they are on the host
    capacity : length of the longest sequence at its end
    load_weights : may be collective; sets the parameters of the stages that it is called with, which are this rank's
    slots : sequences at once
    """
    group = group_of(mesh.comm)
    model, schedule = plan.model, plan.schedule.forward_only_part(plan.schedule.microbatches)
    with group.together("generate: the memory of a decoder"):
        memory.check_decoding(plan, mesh.pipe.rank, dtype, (slots, capacity), mesh.seq.size)
    pieces, held = Pieces(), list[list[Piece]]()

    def attend(window: int | None = None) -> SlotCache:
        back = model.seq if window is None else min(window, model.seq)
        return SlotCache(pieces, slots, capacity, mesh.seq, window=back)

    layers = model.build(attend)
    with group.together("generate: the positions"):
        limits.check_positions(layers, capacity)
    with group.together("generate: the stages"):
        stages = []
        for start, stop in plan.ranges_of(mesh.pipe.rank):
            cuts = [start, stop - 1, stop] if stop == len(layers) else [start, stop]
            inner = [nn.Stage(layers[low:high], dtype=dtype, first=low) for low, high in pairwise(cuts)]
            stages.append(DecodingStage(inner, pieces, held))
    with group.together("generate: the parameters"):
        load_weights([inner for stage in stages for inner in stage.inner_stages])
    return Decoder(Pipeline(stages, schedule, mesh.pipe, replicas=mesh.replicas), mesh, held, slots, capacity)
