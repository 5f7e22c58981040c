"""Models of other libraries, cut as cuts.py says, against one process of PyTorch: float64, to 1e-9.

Three steps of plain descent: losses, all gradients of the first step, all parameters and buffers after the last.
"""

from __future__ import annotations

import copy
from functools import lru_cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpipipe import Mesh, Pipeline, adapters, checkpoint, cut, schedules  # noqa: E402
from mpipipe.job import inprocess  # noqa: E402
from tests.models.cuts import CASES  # noqa: E402
from tests.models.meshes import MESHES, MICROBATCHES, RATE, STEPS, check_equal, interleaved  # noqa: E402

pytestmark = pytest.mark.models


def made(name):
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        case = CASES[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    case.model.double().train()
    for each in case.model.parameters():
        if each.is_complex():
            each.data = each.data.to(torch.complex128)
    return case


def batches(case, step, replica):
    draw = np.random.default_rng([step, replica])
    return zip(*(case.draw(draw) for _ in range(MICROBATCHES)))


def tensors(tree):
    return tuple(map(torch.from_numpy, tree)) if isinstance(tree, tuple) else (torch.from_numpy(tree),)


def by_place(parts, kind):
    found = {}
    for place, part in enumerate(parts):
        for key, each in getattr(part, f"named_{kind}")():
            found[f"{place}.{key}"] = each
    return found


def real(tensor):
    array = tensor.detach().numpy()
    return np.stack([array.real, array.imag], -1).copy() if array.dtype.kind == "c" else array.copy()


@lru_cache(maxsize=2)
def judged(name, replicas):
    """(losses, gradients of the first step, parameters and buffers after the last) of the whole model.

    Each replica has state of its own, as in DistributedDataParallel; the buffers are those of the first.
    """
    first = made(name)
    cases = [first, *(copy.deepcopy(first) for _ in range(replicas - 1))]
    losses, gradients = [], {}
    for step in range(STEPS):
        total = 0.0
        for replica, case in enumerate(cases):
            case.model.zero_grad()
            for x, target in zip(*batches(case, step, replica)):
                value = case.loss(case.run(*tensors(x)), *tensors(target)) / (MICROBATCHES * replicas)
                value.backward()
                total += value.item()
        losses.append(total)
        with torch.no_grad():
            for several in zip(*(case.model.parameters() for case in cases)):
                sums = sum(torch.zeros_like(each) if each.grad is None else each.grad for each in several)
                for each in several:
                    each.grad = sums.clone()
            if step == 0:
                gradients = {key: real(each.grad) for key, each in by_place(first.parts, "parameters").items()}
            for case in cases:
                for each in case.model.parameters():
                    each -= RATE * each.grad
    state = {key: real(each) for kind in ("parameters", "buffers") for key, each in by_place(first.parts, kind).items()}
    return losses, gradients, state


def trained(name, pipe, replicas, make, recompute, steps=range(STEPS), load=None, save=None):
    """The same of ranks that are threads."""
    schedule = make(pipe, microbatches=MICROBATCHES)
    cases = [made(name) for _ in range(pipe * replicas)]  # not by the threads, which share the generator of PyTorch

    def job(comm):
        case, losses, gradients = cases[comm.rank], [], {}
        with Mesh(comm, pipe=pipe) as mesh:
            stages = cut(case.parts, schedule, mesh.pipe.rank, dtype="float64")
            loss = adapters.torch_loss(case.loss)
            if load is not None:
                checkpoint.load(load, mesh, stages)
            with Pipeline(stages, schedule, mesh.pipe, loss, recompute, replicas=mesh.replicas) as pipeline:
                pipeline.steps_taken = steps[0]
                for step in steps:
                    inputs, targets = map(list, batches(case, step, mesh.data.rank))
                    result = pipeline.step(inputs if stages.is_first else None, targets if stages.is_last else None)
                    losses.append(result.loss)
                    for stage in stages:
                        if step == 0:
                            gradients |= {key: array.copy() for key, array in stage.gradients.items()}
                        stage.parameters.flat[...] -= RATE * stage.gradients.flat
            if save is not None:
                checkpoint.save(save, mesh, stages, step=steps[-1])
            state = {}
            for stage in stages:
                state |= {key: array.copy() for key, array in stage.parameters.items()}
                for layer in stage.layers:
                    for key, each in layer.given.named_buffers():
                        state[f"{layer.name}.{key}"] = real(each)
            return losses, gradients, state if mesh.data.rank == 0 else {}

    each_rank = inprocess.run(pipe * replicas, job)
    gradients, state = {}, {}
    for losses, some, others in each_rank:
        assert losses == each_rank[0][0]
        gradients |= some
        state |= others
    return each_rank[0][0], gradients, state


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_others_is_trained_as_by_pytorch_alone(name, mesh):
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
