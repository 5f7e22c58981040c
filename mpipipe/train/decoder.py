"""A pipeline that continues texts: the layers of a training, each with a cache of keys and values."""

from __future__ import annotations

from mpipipe import nn
from mpipipe.attention import Cached
from mpipipe.comm.group import group_of
from mpipipe.pipeline import Pipeline
from mpipipe.train import limits
from mpipipe.train.training_plan import TrainingPlan


def decoder(plan: TrainingPlan, mesh, dtype: str, capacity: int, fill) -> Pipeline:
    """A pipeline whose forwards take the next bytes of one text, int64 (1, n), to their logits (1, n, vocab).

    Attention looks back over the last `plan.model.seq` positions in each layer. Up to that length this is the model
    as it was trained; beyond it, no distance occurs that the rotary positions did not have in training.

    Parameters
    ----------
    plan : its model, cut and placement of stages
    mesh : its `pipe` has the stages; the ranks of its `seq` share the caches
    dtype : of parameters and caches, float32 or float64; they are on the host
    capacity : length of the text at the end
    fill : fill(stages) sets the parameters of this rank's stages

    Collective over the mesh; an error of `fill` is raised on every rank, as is ConfigError where parameters and caches
    cannot fit into memory. To be closed by the caller.
    """
    group = group_of(mesh.comm)
    with group.together("generate: the memory of a decoder"):
        limits.check_decoding(plan, mesh.pipe.rank, dtype, capacity, mesh.seq.size)
    layers = plan.model.build(lambda: Cached(capacity, mesh.seq, window=plan.model.seq))
    with group.together("generate: the stages"):
        parts = [plan.layer_ranges[number] for number in plan.schedule.stages_of(mesh.pipe.rank)]
        stages = [nn.Stage(layers[start:stop], dtype=dtype, first=start) for start, stop in parts]
        fill(stages)
    return Pipeline(stages, plan.schedule.forward_only_part(1), mesh.pipe, replicas=mesh.replicas)
