"""The U-Net of docs/tasks: its losses are those of a loop of PyTorch alone, and it learns what it is to learn."""

import json
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support.launch import ROOT  # noqa: E402

from mpipipe import adapters, optim  # noqa: E402
from mpipipe.job import inprocess  # noqa: E402
from mpipipe.train import run  # noqa: E402
from mpipipe.train.task_file import TaskFileConfig, load_task  # noqa: E402

pytestmark = pytest.mark.judges
FILE = ROOT / "docs" / "tasks" / "unet.py"
SAMPLES, WIDTH, STEPS, BATCH, LR, CLIP = 48, 4, 3, 8, 3e-3, 0.5
KEYS = dict(steps=STEPS, batch=BATCH, lr=LR, warmup=0, clip=CLIP, log_every=1, eval_batches=1, dtype="float64")
MESHES = {
    "1": (1, dict(microbatches=2)),
    "pipe 2": (2, dict(microbatches=4)),
    "pipe 2 of two stages each": (2, dict(schedule="zero_bubble_v", chunks=2)),
    "pipe 2 x data 2": (4, dict(pipe=2, schedule="zero_bubble_h1")),
    "pipe 4": (4, dict(recompute=True)),
}


def records(comm, out, values, **keys):
    config = TaskFileConfig(**(KEYS | keys), device="cpu", out=str(out))
    run(load_task(str(FILE), values, comm), config, comm)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] if comm.rank == 0 else []


def losses(comm, out, **keys):
    """Loss and relative error of the validation, then the loss of each step, then the validation again."""
    found = records(comm, out, (f"samples={SAMPLES}", f"width={WIDTH}"), **keys)
    return [record[name] for record in found for name in ("loss", "validation", "relative_error") if name in record]


@pytest.fixture(scope="module")
def alone():
    """The same numbers by a loop of PyTorch, without pipelines, stages and micro-batches."""
    spec = spec_from_file_location("unet", FILE)
    unet = module_from_spec(spec)
    spec.loader.exec_module(unet)
    parts = []
    sizes = [(1, 4), (4, 8), (8, 16), (24, 8), (12, 4), (4, 1, 1)]
    for place, kind in enumerate([unet.Down, unet.Down, unet.Twice, unet.Up, unet.Up, torch.nn.Conv2d]):
        with adapters.seeded(0, place):
            parts.append(kind(*sizes[place]).double())

    def network(x):
        x, fine = parts[0](x)
        x, coarse = parts[1](x)
        return parts[5](parts[4](parts[3](parts[2](x), coarse), fine))

    parameters = [each for part in parts for each in part.parameters()]
    groups = [{"params": [each for each in parameters if (each.ndim > 1) == decays]} for decays in (True, False)]
    optimizer = torch.optim.AdamW(
        [groups[0] | {"weight_decay": 0.1}, groups[1] | {"weight_decay": 0}], betas=(0.9, 0.95)
    )
    inputs, targets = map(torch.from_numpy, unet.data(SAMPLES))

    def validation():
        with torch.no_grad():
            output, target = network(inputs[-32:][:BATCH]), targets[-32:][:BATCH]
        relative = (output - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)
        return [torch.nn.functional.mse_loss(output, target).item(), relative.mean().item()]

    found = validation()
    for step in range(STEPS):
        rows = np.random.default_rng([1, step]).permutation(SAMPLES - 32)[:BATCH]
        loss = torch.nn.functional.mse_loss(network(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((each.grad**2).sum() for each in parameters))
        for each in parameters:
            each.grad *= min(1, CLIP / norm)
        for group in optimizer.param_groups:
            group["lr"] = optim.warmup_cosine(step, STEPS, LR, 0)
        optimizer.step()
        found.append(loss.item())
    return found + validation()


@pytest.mark.parametrize("ranks, keys", MESHES.values(), ids=MESHES)
def test_any_mesh_has_the_losses_of_pytorch_alone(alone, tmp_path, ranks, keys):
    found = inprocess.run(ranks, lambda comm: losses(comm, tmp_path / "run", **keys))[0]
    assert found == pytest.approx(alone, rel=1e-10)
