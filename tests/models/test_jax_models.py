"""Models of equinox and flax, cut as jax_cuts.py says, against one process of JAX: as test_models.py does it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from mpipipe import Mesh, Pipeline, adapters, checkpoint, cut, schedules  # noqa: E402
from mpipipe.job import inprocess  # noqa: E402
from tests.models.jax_cuts import CASES, ROWS, SIZE  # noqa: E402
from tests.models.meshes import MESHES, MICROBATCHES, RATE, STEPS, check_equal, interleaved  # noqa: E402

pytestmark = pytest.mark.models


def squared(output, target):
    return ((output - target) ** 2).mean()


def batches(step, replica):
    draw = np.random.default_rng([step, replica])
    return [[*draw.normal(size=(MICROBATCHES, ROWS, SIZE))] for _ in range(2)]


def by_place(trees):
    found = {}
    for place, tree in enumerate(trees):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            found[f"{place}.{jax.tree_util.keystr(path, simple=True, separator='.')}"] = np.array(leaf)
    return found


@lru_cache(maxsize=2)
def judged(name, replicas):
    """(losses, gradients of the first step, parameters and states after the last) of the whole model."""
    case = CASES[name]()
    parameters, states = [part[1] for part in case.parts], [case.state] * replicas

    @jax.jit
    @jax.value_and_grad
    def plain(parameters, state, x, target):
        return squared(case.run(parameters, state, x)[0], target)

    losses, first = [], {}
    for step in range(STEPS):
        total, sums = 0.0, jax.tree.map(np.zeros_like, parameters)
        for replica in range(replicas):
            for x, target in zip(*batches(step, replica)):
                # a state of equinox may be used once
                again = jax.tree.map(lambda leaf: leaf, states[replica])
                value, slopes = plain(parameters, again, x, target)
                states[replica] = case.run(parameters, states[replica], x)[1]
                total += float(value) / (MICROBATCHES * replicas)
                sums = jax.tree.map(lambda a, b: a + b / (MICROBATCHES * replicas), sums, slopes)
        losses.append(total)
        first = first or by_place(sums)
        parameters = jax.tree.map(lambda a, b: a - RATE * b, parameters, sums)
    return losses, first, by_place(parameters) | by_place(case.states_of(states[0]))


def trained(name, pipe, replicas, make, recompute, steps=range(STEPS), load=None, save=None):
    """The same of ranks that are threads."""
    schedule, parts = make(pipe, microbatches=MICROBATCHES), CASES[name]().parts

    def job(comm):
        losses, gradients = [], {}
        with Mesh(comm, pipe=pipe) as mesh:
            stages = cut(parts, schedule, mesh.pipe.rank, dtype="float64")
            loss = adapters.jax_loss(squared)
            if load is not None:
                checkpoint.load(load, mesh, stages)
            with Pipeline(stages, schedule, mesh.pipe, loss, recompute, replicas=mesh.replicas) as pipeline:
                for step in steps:
                    inputs, targets = batches(step, mesh.data.rank)
                    result = pipeline.step(inputs if stages.is_first else None, targets if stages.is_last else None)
                    losses.append(result.loss)
                    for stage in stages:
                        if step == 0:
                            gradients |= {key: array.copy() for key, array in stage.gradients.items()}
                        stage.parameters.flat[...] -= RATE * stage.gradients.flat
                before = [array.copy() for stage in stages for array in stage.state.values()]
                pipeline.evaluate(inputs if stages.is_first else None, targets if stages.is_last else None)
            state = {
                key: array.copy()
                for stage in stages
                for key, array in [*stage.parameters.items(), *stage.state.items()]
            }
            for array, now in zip(before, (array for stage in stages for array in stage.state.values())):
                np.testing.assert_array_equal(array, now)
            if save is not None:
                checkpoint.save(save, mesh, stages, step=steps[-1])
            return losses, gradients, state if mesh.data.rank == 0 else {}

    each_rank = inprocess.run(pipe * replicas, job)
    gradients, state = {}, {}
    for _, some, others in each_rank:
        gradients |= some
        state |= others
    return each_rank[0][0], gradients, state


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_others_is_trained_as_by_jax_alone(name, mesh):
    pipe, replicas, *how = MESHES[mesh]
    expected, (losses, gradients, state) = judged(name, replicas), trained(name, pipe, replicas, *how)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-9)
    check_equal(gradients, expected[1])
    check_equal(state, expected[2])


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_others_goes_on_from_a_checkpoint_on_another_mesh(name, tmp_path):
    expected = judged(name, 1)
    first = trained(name, 2, 1, schedules.one_f_one_b, False, range(2), save=tmp_path)
    losses, _, state = trained(name, 1, 1, interleaved, True, range(2, 3), load=checkpoint.newest(tmp_path))
    np.testing.assert_allclose([*first[0], *losses], expected[0], rtol=1e-9)
    check_equal(state, expected[2])
