"""Gradients that follow from the names of parameters alone, on the host or on a GPU, and all that a step may change."""

import numpy as np

from mpipipe import arrays, nn, optim
from mpipipe.optim.norm import Norm

OPTIMIZERS = {
    "AdamW": lambda stages, **keys: optim.AdamW(stages, 0.01, weight_decay=0.1, **keys),
    "SGD": lambda stages, **keys: optim.SGD(stages, 0.01, weight_decay=0.1, **keys),
    "SGD with momentum": lambda stages, **keys: optim.SGD(stages, 0.01, 0.9, 0.1, **keys),
}


def small_stages(dtype="float32", device="cpu", sizes=((37, 13), (37, 13))):
    """Stages of a linear layer and a norm, whose parameters have two ranges of weight decay."""
    layers = [[nn.Linear(*size), nn.RMSNorm(size[1])] for size in sizes]
    return [nn.Stage(both, dtype, number, device, 2 * number) for number, both in enumerate(layers)]


def four_layers(dtype="float64"):
    """Four layers in two stages."""
    layers = [nn.Linear(200, 300), nn.RMSNorm(300), nn.Linear(300, 5), nn.LayerNorm(5)]
    stages = [nn.Stage(layers[at : at + 2], dtype, first=at) for at in (0, 2)]
    for index, stage in enumerate(stages):
        stage.index = index
    return stages


def fill(stages, seed=0, size=1.0, bad=None):
    """Set gradients to numbers of this size; `bad` in one place of the last stage."""
    for stage in stages:
        gradients = stage.gradients
        flat = np.zeros(gradients.flat.size, gradients.flat.dtype)
        for name, at in gradients.offsets.items():
            count = gradients[name].size
            flat[at : at + count] = np.random.default_rng([seed, *name.encode()]).standard_normal(count) * size
        if bad is not None and stage is stages[-1]:
            flat[gradients.offsets[f"{stage.first}.bias"] + 3] = bad
        arrays.copy_into(gradients.flat, arrays.upload(flat) if arrays.is_device(gradients.flat) else flat)


def contents(stages, optimizer=None):
    """Return everything that a step may change, as bytes."""
    kept = [flat for s in stages for flat in (s.parameters.flat, s.compute.flat, s.gradients.flat)]
    if optimizer is not None:
        kept += [state[key] for state in optimizer.state for key in state]
    return [array.tobytes() for array in arrays.download_all(kept)]


def watched(optimizer, device):
    """The synchronisations of a device before and after each step of an optimizer, noted from now on."""
    waits, make = [], optimizer.step

    def step(**numbers):
        waits.append(list(device.synchronisations))
        make(**numbers)
        waits.append(list(device.synchronisations))

    optimizer.step = step
    return waits


def gradient_norm(stages, comm=None, scale=1.0):
    """The norm of all gradients of the model: infinite or NaN where a gradient is."""
    return Norm(stages, comm).measure(scale).norm
