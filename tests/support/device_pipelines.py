"""Pipelines on devices: received inputs last until their weight gradients; communicators end after a failure."""

import numpy as np

from mpipipe import Pipeline, arrays, nn
from mpipipe.schedules import zero_bubble_h1
from support import dense
from support.tolerance import close, largest


def check_weight_gradients_from_received_inputs(comm, device):
    """Bare linear stages keep the received array itself for W, which zero_bubble_h1 puts off while more arrive."""
    schedule, width = zero_bubble_h1(comm.size, 12), 8
    x, target = np.random.default_rng(0).normal(size=(2, 24, width))
    layers = [nn.Stage([nn.Linear(width, width)], "float64", seed=rank, first=rank) for rank in range(comm.size)]
    dense.through(layers, x, lambda y: nn.mean_squared_error(y, target))
    stage = nn.Stage([nn.Linear(width, width)], "float64", seed=comm.rank, first=comm.rank, device=device)
    with Pipeline([stage], schedule, comm, loss=nn.mean_squared_error) as pipeline:
        for _ in range(3):
            pipeline.step(*dense.placed(schedule, comm.rank, x, target))
            found = arrays.download(stage.gradients.flat)
            right = layers[comm.rank].gradients.flat
            close(found, right, 2 * width * comm.size + len(x), largest(right))
