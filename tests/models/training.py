"""One loop for the models of all libraries: they are trained on a mesh of ranks, and must be what one process makes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpipipe import Mesh, Pipeline, checkpoint, cut, schedules

MICROBATCHES, STEPS, RATE = 4, 3, 0.05
interleaved = partial(schedules.interleaved_1f1b, chunks=2)
# (ranks of a pipeline, replicas, schedule)
MESHES = {
    "1": (1, 1, schedules.one_f_one_b),
    "2": (2, 1, schedules.one_f_one_b),
    "2 interleaved": (2, 1, interleaved),
    "4 ZB-H1": (4, 1, schedules.zero_bubble_h1),
    "2 ZB-H1 x 2": (2, 2, schedules.zero_bubble_h1),
}


class Model(NamedTuple):
    parts: list[Any]
    loss: Callable[..., Any]
    batches: Callable[[int, int], tuple[list[Any], list[Any]]]  # micro-batches of a step and a replica
    judged: Callable[[int], tuple[list[float], dict[str, Any], dict[str, Any]]]  # by the library, of so many replicas


def trained(comm, model, pipe, replicas, make, recompute, steps=range(STEPS), load=None, save=None):
    """(losses, gradients of the first step, parameters and states after the last) of plain descent, on every rank."""
    schedule, losses, gradients = make(pipe, microbatches=MICROBATCHES), [], {}
    with Mesh(comm, pipe=pipe) as mesh:
        stages = cut(model.parts, schedule, mesh.pipe.rank, dtype="float64")
        if load is not None:
            checkpoint.load(load, mesh, stages)
        with Pipeline(stages, schedule, mesh.pipe, model.loss, recompute, replicas=mesh.replicas) as pipeline:
            pipeline.steps_taken = steps[0]
            for step in steps:
                inputs, targets = model.batches(step, mesh.data.rank)
                batch = inputs if stages.is_first else None, targets if stages.is_last else None
                losses.append(pipeline.step(*batch).loss)
                for stage in stages:
                    if step == 0:
                        gradients |= copies(stage.gradients)
                    stage.parameters.flat[...] -= RATE * stage.gradients.flat
            before = [copies(stage.state) for stage in stages]
            pipeline.evaluate(*batch)
            np.testing.assert_equal([copies(stage.state) for stage in stages], before)
        if save is not None:
            checkpoint.save(save, mesh, stages, step=steps[-1])
        state = {}
        for stage in stages if mesh.data.rank == 0 else ():
            state |= copies(stage.parameters) | copies(stage.state)
    gradients_of_all, states = {}, {}
    for others, some, rest in comm.allgather((losses, gradients, state)):
        assert others == losses
        gradients_of_all |= some
        states |= rest
    return losses, gradients_of_all, states


def copies(arrays):
    return {name: np.array(array) for name, array in arrays.items()}


def check_equal(found, expected):
    assert {*found} == {*expected}
    for key, array in expected.items():
        allowed = 1e-9 * max(1, np.abs(array).max(initial=0))
        np.testing.assert_allclose(found[key], array, rtol=1e-9, atol=allowed, err_msg=key)
