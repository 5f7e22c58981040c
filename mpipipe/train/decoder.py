"""A pipeline that continues texts: the layers of a training, each with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpipipe import nn
from mpipipe.attention import Cached
from mpipipe.comm.group import group_of
from mpipipe.comm.mesh import Mesh
from mpipipe.pipeline import Pipeline
from mpipipe.train import memory
from mpipipe.train.training_plan import TrainingPlan

LoadWeights = Callable[[Sequence[nn.Stage]], None]


def build_decoder(plan: TrainingPlan, mesh: Mesh, dtype: str, capacity: int, load_weights: LoadWeights) -> Pipeline:
    """Build a pipeline whose forwards take the next bytes of one text, int64 (1, n), to their logits (1, n, vocab).

    Attention looks back over the last `plan.model.seq` positions in each layer. Up to that length this is the model as
    it was trained. Beyond it, no distance occurs that the rotary positions did not have in training.

    Collective over the mesh. An error of `load_weights` is raised on every rank, and so is ConfigError where parameters
    and caches cannot fit into memory. The caller closes the pipeline.

    Parameters
    ----------
    plan : model, cut and placement of stages
    mesh : its `pipe` has the stages; the ranks of its `seq` share the caches
    dtype : of parameters and caches, float32 or float64; they are on the host
    capacity : length of the text at the end
    load_weights : sets the parameters of the stages that it is called with, which are this rank's
    """
    group = group_of(mesh.comm)
    with group.together("generate: the memory of a decoder"):
        memory.check_decoding(plan, mesh.pipe.rank, dtype, capacity, mesh.seq.size)
    layers = plan.model.build(lambda: Cached(capacity, mesh.seq, window=plan.model.seq))
    with group.together("generate: the stages"):
        ranges = plan.ranges_of(mesh.pipe.rank)
        stages = [nn.Stage(layers[start:stop], dtype=dtype, first=start) for start, stop in ranges]
        load_weights(stages)
    return Pipeline(stages, plan.schedule.forward_only_part(1), mesh.pipe, replicas=mesh.replicas)
