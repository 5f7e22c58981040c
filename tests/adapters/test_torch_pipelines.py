"""Stages of PyTorch in pipelines: losses and steps are those of PyTorch alone; what draws, and what is saved."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support import dense, torch_models  # noqa: E402

from mpipipe import Mesh, Pipeline, adapters, checkpoint, optim, schedules  # noqa: E402

pytestmark = pytest.mark.judges
ENOUGH = 1e-10  # of gradients about 1 in float64, by sums of some thousand terms, with room for the exponential


def close(found, expected, what=""):
    assert np.abs(np.asarray(found) - np.asarray(expected)).max(initial=0) <= ENOUGH, what


def own_stages(schedule, rank, **options):
    modules = torch_models.parts(schedule.stages, **options)
    return modules, [adapters.torch_stage(modules[s], prefix=f"{s}.") for s in schedule.stages_of(rank)]


def step_of(comm, schedule, stages, data, calls=1, **options):
    with Pipeline(stages, schedule, comm, loss=adapters.torch_loss(torch_models.cross_entropy), **options) as pipeline:
        for _ in range(calls):
            result = pipeline.step(*dense.placed(schedule, comm.rank, *data))
    return result


def test_an_optimizer_of_pytorch_clips_over_all_ranks(comm):
    schedule, data = dense.build("one_f_one_b", comm.size, 1, 4), torch_models.batch()
    _, (stage,) = own_stages(schedule, comm.rank)
    whole = torch.nn.Sequential(*torch_models.parts(schedule.stages))
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    ours = torch.optim.SGD(stage.module.parameters(), lr=0.1, momentum=0.9)
    words, following = map(torch.from_numpy, data)
    with Pipeline([stage], schedule, comm, loss=adapters.torch_loss(torch_models.cross_entropy)) as pipeline:
        for _ in range(3):
            theirs.zero_grad()
            loss = torch_models.cross_entropy(whole(words), following)
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
            for parameter in whole.parameters():
                parameter.grad *= 0.25 / norm  # clip_grad_norm_ divides by 1e-6 more
            theirs.step()
            ours.zero_grad()
            close(pipeline.step(*dense.placed(schedule, comm.rank, *data)).loss, loss.item(), "loss")
            close(optim.clip_by_global_norm([stage], 0.25, comm), norm.item(), "norm")
            ours.step()
    for name, parameter in whole[comm.rank].named_parameters():
        close(stage.parameters[f"{comm.rank}.{name}"], parameter.detach(), name)


@pytest.mark.parametrize("none", [False, True], ids=["gradients kept", "zero_grad() set them to None"])
def test_replicas_are_summed(pair, none):
    """Whatever a user did to .grad between steps."""
    alone, schedule, data = pair.Split(pair.rank, 0), schedules.gpipe(1, 2), torch_models.batch()
    loss, (gradients,) = torch_models.reference(torch_models.parts(1), *data)
    _, (stage,) = own_stages(schedule, 0)
    mine = [x[4 * pair.rank : 4 * pair.rank + 4] for x in data]
    rate = adapters.torch_loss(torch_models.cross_entropy)
    with Pipeline([stage], schedule, alone, loss=rate, replicas=pair) as pipeline:
        for _ in range(2):
            if none:
                stage.module.zero_grad()
            close(pipeline.step(*mine).loss, loss, "loss")
    for name, parameter in stage.module.named_parameters():
        close(parameter.grad, gradients[name], name)
    alone.Free()


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_the_same_for_every_schedule_and_off_in_an_evaluation(comm, recompute):
    """Masks depend on step and micro-batch, so those of a recomputation are those of its forward."""
    data = torch_models.batch()
    found = []
    for schedule in (schedules.gpipe(comm.size, 4), schedules.zero_bubble_h1(comm.size, 4)):
        _, (stage,) = own_stages(schedule, comm.rank, dropout=0.4)
        again = recompute and schedule.name == "gpipe"
        state = torch.get_rng_state()
        result = step_of(comm, schedule, [stage], data, calls=2, recompute=again)
        assert torch.equal(torch.get_rng_state(), state)  # the user's own numbers go on as if nothing had been drawn
        found.append((result.losses, stage.gradients.flat.copy()))
    assert found[0][0] == found[1][0] and len(set(found[0][0])) == 4
    close(found[0][1], found[1][1])
    loss, _ = torch_models.reference(torch_models.parts(comm.size), *data)
    assert abs(found[0][0][0] - loss) > 1e-6
    with Pipeline([stage], schedule, comm, loss=adapters.torch_loss(torch_models.cross_entropy)) as pipeline:
        close(pipeline.evaluate(*dense.placed(schedule, comm.rank, *data)), loss, "without dropout")
        pipeline.step(*dense.placed(schedule, comm.rank, *data))


def test_a_checkpoint_has_parameters_and_buffers_whatever_the_cut(pair, mpi_tmp_path):
    made = torch_models.parts(2)
    for number, module in enumerate(made):
        module.register_buffer("table", torch.arange(3) + number)
        module.codes = torch.nn.Parameter(torch.arange(5) + number, requires_grad=False)
        module.note = torch.ones(2)
        module[0].requires_grad_(bool(number))
    mine = adapters.torch_stage(made[pair.rank], prefix=f"{pair.rank}.")
    optimizer = optim.AdamW([mine], lr=0.1)
    mine.gradients.flat[...] = 1
    optimizer.step()
    with Mesh(pair, pipe=2) as mesh:
        checkpoint.check_replicas(mesh, [mine], optimizer)
        path = checkpoint.save(mpi_tmp_path, mesh, [mine], optimizer, step=1)
    fresh = torch_models.parts(2)
    for module in fresh:
        module.register_buffer("table", torch.zeros(3, dtype=torch.int64))
        module.codes = torch.nn.Parameter(torch.arange(5), requires_grad=False)
        for parameter in module.parameters():
            parameter.data.zero_()
        module[0].requires_grad_(module is fresh[1])
    both = [adapters.torch_stage(module, prefix=f"{number}.") for number, module in enumerate(fresh)]
    again = optim.AdamW(both, lr=0.1)
    with Mesh(pair) as mesh:
        checkpoint.load(path, mesh, both, again)
    for name, value in made[pair.rank].state_dict().items():
        assert torch.equal(fresh[pair.rank].state_dict()[name], value), name
    assert ".codes" in (path / "manifest.json").read_text() and "note" not in (path / "manifest.json").read_text()
    loaded = again.named_state()["first"]
    for name, value in optimizer.named_state()["first"].items():
        np.testing.assert_array_equal(loaded[name], value)
    assert not any(name.startswith("0.0.") for name in loaded)  # it is frozen
