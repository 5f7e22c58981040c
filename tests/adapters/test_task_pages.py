"""The tasks of docs/tasks that are modules of PyTorch: any mesh has the losses of a loop of PyTorch alone."""

import json
from importlib.util import module_from_spec, spec_from_file_location

import pytest

torch = pytest.importorskip("torch")
from support.launch import ROOT  # noqa: E402

from mpipipe import adapters, optim  # noqa: E402
from mpipipe.job import inprocess  # noqa: E402
from mpipipe.train import TaskConfig, run  # noqa: E402

pytestmark = pytest.mark.judges
STEPS, BATCH, LR = 3, 12, 3e-2
CONFIG = dict(steps=STEPS, batch=BATCH, lr=LR, clip=1e9, log_every=1, eval_batches=2, dtype="float64", device="cpu")
MESHES = {
    "1": (1, dict(microbatches=5)),
    "pipe 2": (2, dict(microbatches=4, recompute=True)),
    "pipe 2 of two stages each": (2, dict(schedule="zero_bubble_v", chunks=2)),
    "data 2": (2, dict(pipe=1, microbatches=1)),
    "pipe 2 x data 2": (4, dict(pipe=2, schedule="zero_bubble_h1")),
    "pipe 4": (4, dict(recompute=True)),
}


def page(name):
    spec = spec_from_file_location(name, ROOT / "docs" / "tasks" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


graphs, unet = page("graphs"), page("unet")


class Descent:
    def optimizer(self, stages, config):
        return optim.SGD(stages, lr=LR, momentum=0.0)

    def rate_at(self, step, config):
        return LR


class UNet(Descent, unet.UNet):
    samples, width = 48, 4

    def network(self, parts, x):
        x, fine = parts[0](x)
        x, coarse = parts[1](x)
        return parts[5](parts[4](parts[3](parts[2](x), coarse), fine))


class Graphs(Descent, graphs.Graphs):
    """Micro-batches of any shapes."""

    width, rounds = 8, 2

    def network(self, parts, x):
        for part in parts:
            x = part(*x)
        return x


class OfNodes(Graphs):
    """A loss over nodes, of which no two micro-batches have the same number, and which it returns."""

    class Each(torch.nn.Linear):
        def forward(self, nodes, edges, graphs):
            return super().forward(nodes)

    def layers(self, shard):
        return [*super().layers(shard)[:-1], lambda: self.Each(8, 1)]

    def batch(self, step, rows, shard):
        inputs, _ = super().batch(step, rows, shard)
        return inputs, inputs[0][:, :1]


class Weighed(OfNodes):
    loss = adapters.torch_loss(lambda y, target: (((y - target) ** 2).mean(), len(y)))


@pytest.fixture(scope="module", params=[UNet, Graphs, OfNodes, Weighed])
def judged(request):
    """(task, losses): validation, then the loss of each step, then validation, by a loop over whole batches."""
    task, parts = request.param(), []
    for place, entry in enumerate(task.layers(None)):
        with adapters.seeded(0, place):
            parts.append(getattr(entry, "entry", entry)().double())
    parameters = [each for part in parts for each in part.parameters()]

    def loss(x, target):
        x = tuple(map(torch.from_numpy, x)) if isinstance(x, tuple) else torch.from_numpy(x)
        y = task.network(parts, x)
        return torch.nn.functional.mse_loss(y, torch.from_numpy(target)), len(y)

    def validation():
        with torch.no_grad():
            values = [loss(*task.validation(index, range(BATCH), None)) for index in range(2)]
        return sum(float(value) * count for value, count in values) / sum(count for _, count in values)

    losses = [validation()]
    for step in range(STEPS):
        value, _ = loss(*task.batch(step, range(BATCH), None))
        losses.append(value.item())
        for each, slope in zip(parameters, torch.autograd.grad(value, parameters)):
            each.data -= LR * slope
    return request.param, [*losses, validation()]


def losses(comm, make, out, **keys):
    run(make(), TaskConfig(**CONFIG | keys, out=str(out)), comm)
    found = map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if comm.rank == 0 else ()
    return [record[name] for record in found for name in ("loss", "validation") if name in record]


@pytest.mark.parametrize("ranks, keys", MESHES.values(), ids=MESHES)
def test_any_mesh_has_the_losses_of_pytorch_alone(judged, tmp_path, ranks, keys):
    make, expected = judged
    found = inprocess.run(ranks, lambda comm: losses(comm, make, tmp_path / "run", **keys))[0]
    assert found == pytest.approx(expected, rel=1e-10)
