"""A GPT whose head is cut into slices: loss, gradients and logits of the whole head, however stages divide them."""

import numpy as np
import pytest
from support import dense
from support.small_gpt import MODEL, on_one_rank, text

from mpipipe import Branches, Pipeline, nn, optim
from mpipipe.attention import Local
from mpipipe.language.models import GPT
from mpipipe.nn.layers import head_slices
from mpipipe.planning import LayerPlan
from mpipipe.schedules import gpipe, partition

CUTS = [("one_f_one_b", 1), ("zero_bubble_h1", 1), ("interleaved_1f1b", 2)]
HEAD = 1 + 2 * MODEL["layers"]


def cut(comm, schedule, slices, labels=True, dtype="float64", device="cpu", **sizes):
    """(the plan, this rank's stages) of a model with slices."""
    model = GPT(**{**MODEL, "vocab": 33, **sizes}, head_slices=slices)
    layers = model.build(Local(causal=True), labels=labels)
    plan = LayerPlan(schedule, partition(model.costs(), schedule.stages), 1).with_names(layers)
    return plan, plan.stages(comm.rank, layers, dtype, 3, device)


def named_as_the_whole(comm, arrays_of_stages, slices, tied):
    """All parameters or gradients of all ranks, with the slices put together under the names of the whole."""
    found = {}
    for part in comm.allgather({name: array.copy() for each in arrays_of_stages for name, array in each.items()}):
        found.update(part)
    if slices > 1:
        names = [f"{HEAD}.1.weight", *(f"{HEAD + number}.weight" for number in range(1, slices))]
        found[names[0]] = np.concatenate([found.pop(name) for name in names])
        if tied:
            found["0.weight"] = np.concatenate([found.pop(f"0.weight_{number}") for number in range(slices)])
    return found


@pytest.mark.parametrize("slices, tied", [(2, False), (3, True), (5, False), (5, True)])
def test_loss_and_gradients_are_those_of_the_whole_head(comm, monkeypatch, slices, tied):
    monkeypatch.setitem(head_slices.KEPT_BYTES, "cpu", slices % 2 << 20)
    expected, loss = on_one_rank(3, vocab=33, tied=tied)
    for name, chunks in CUTS:
        plan, stages = cut(comm, dense.build(name, comm.size, chunks, 3), slices, tied=tied)
        x, t = text(9)
        batch = dense.placed(plan.schedule, comm.rank, Branches(x, labels=t), t)
        with Pipeline(stages, plan.schedule, comm, loss=nn.mean_of_losses, recompute=chunks == 2) as pipeline:
            for _ in range(2):
                found = pipeline.step(*batch).loss
            evaluated = pipeline.evaluate(*batch)
        assert abs(found - loss) < 1e-12 * loss and abs(evaluated - loss) < 1e-12 * loss
        every = named_as_the_whole(comm, [stage.gradients for stage in stages], slices, tied)
        assert set(every) == set(comm.allreduce(list(expected))) or set(expected) <= set(every)
        for key, gradient in expected.items():
            np.testing.assert_allclose(every[key], gradient, rtol=0, atol=1e-12 * np.abs(gradient).max(), err_msg=key)


def test_without_labels_a_pipeline_gives_the_logits_of_the_whole_head(comm):
    schedule, found = dense.build("interleaved_1f1b", comm.size, 2, 3), []
    for slices in (1, 5):
        plan, stages = cut(comm, schedule, slices, labels=False)
        with Pipeline(stages, plan.schedule, comm) as pipeline:
            found.append(pipeline.forward(dense.placed(plan.schedule, comm.rank, text(6)[0], None)[0]))
    if comm.rank == schedule.placement[-1]:
        np.testing.assert_allclose(*found, rtol=1e-12, atol=1e-13)


def test_stages_on_gpus_hand_on_the_sums(comm, sending):
    losses, (x, t) = [], text(4)
    for device in ("cpu", "cuda"):
        plan, stages = cut(comm, gpipe(comm.size, 2), 3, device=device, tied=True)
        batch = dense.placed(plan.schedule, comm.rank, Branches(x, labels=t), t)
        with Pipeline(stages, plan.schedule, comm, loss=nn.mean_of_losses) as pipeline:
            optimizer = optim.AdamW(stages, lr=1e-2)
            for _ in range(2):
                losses.append(pipeline.step(*batch).loss)
                optimizer.step()
    np.testing.assert_allclose(losses[2:], losses[:2], rtol=1e-10)
