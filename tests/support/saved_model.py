"""A small GPT with an optimizer, to be saved and loaded, and all that a checkpoint holds of it."""

import numpy as np

from mpipipe import Mesh, Pipeline, arrays, checkpoint, nn, optim, schedules
from mpipipe.attention import Local
from mpipipe.checkpoint import contents
from mpipipe.language.models import GPT
from mpipipe.language.models.model_folder import open_model
from mpipipe.language.models.weights import own_arrays
from mpipipe.nn import announce_write

MODEL = GPT(dim=8, layers=3, heads=2, kv_heads=1, hidden=12, seq_len=16, tied=True)
STATE = {"loss": 0.1, "clip": float("inf"), "list": [1, None, True, "text \N{SNOWMAN}"], "nested": {"a": {}}}
HEAD = f"{2 * MODEL.layers + 1}.1.weight"  # the same as 0.weight


def cut(stages, numbers, seed=0, **keys):
    """The stages with these numbers of the model cut into so many."""
    layers, parts = MODEL.build(Local()), schedules.partition(MODEL.costs(), stages)
    return [nn.Stage(layers[slice(*parts[n])], seed=seed, first=parts[n][0], **keys) for n in numbers]


def load_weights(folder, stages):
    """Set parameters from the folder of a model, on one rank."""
    announce_write(*stages)
    open_model(folder).read(own_arrays(stages))


def fill(optimizer):
    """Give each array of the state values that follow from its name alone."""
    optimizer.steps = 7
    for kind, states in optimizer.named_state().items():
        for name, array in states.items():
            source = "0.weight" if name == HEAD else name
            values = np.random.default_rng([*kind.encode(), *source.encode()]).standard_normal(array.shape)
            if isinstance(array, optim.StateShard):
                array.take(values.astype(array.dtype))
            else:
                arrays.copy_into(array, _on(array, values))
    return optimizer


def _on(array, values):
    values = values.astype(array.dtype)
    return arrays.upload(values) if arrays.is_device(array) else values


def trained(mesh, chunks=1, seed=5, kind=optim.AdamW, sharded=False, **keys):
    """(stages, optimizer) of this rank, with tied parameters shared as a pipeline shares them."""
    schedule = schedules.interleaved_1f1b(mesh.pipe.size, chunks, 4)
    stages = cut(schedule.stages, schedule.stages_of(mesh.pipe.rank), seed, **keys)
    with Pipeline(stages, schedule, mesh.pipe, loss=nn.softmax_cross_entropy, replicas=mesh.replicas):
        pass
    return stages, kind(stages, 0.1, replicas=mesh.replicas) if sharded else kind(stages, 0.1)


def values(stages, optimizer):
    """Everything by name, on the host; collective where the state is sharded."""
    found = contents.contents_of(stages, optimizer)
    return {
        name: array.whole() if isinstance(array, optim.StateShard) else np.array(arrays.download(array))
        for name, array in found.items()
    }


def saved(comm, root, pipe, **keys):
    """Save step 3 of a trained model; the path of the checkpoint."""
    with Mesh(comm, pipe=pipe) as mesh:
        stages, optimizer = trained(mesh, **keys)
        return checkpoint.save(root, mesh, stages, fill(optimizer), step=3, state=STATE)
