"""The graph network of docs/tasks: micro-batches of any shapes in a task, as a loop of PyTorch alone computes them."""

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
    "data 2": (2, dict(pipe=1, microbatches=1)),
    "pipe 2 x data 2": (4, dict(pipe=2, schedule="zero_bubble_h1")),
}
spec = spec_from_file_location("graphs", ROOT / "docs" / "tasks" / "graphs.py")
graphs = module_from_spec(spec)
spec.loader.exec_module(graphs)


class Judged(graphs.Graphs):
    width, rounds = 8, 2

    def optimizer(self, stages, config):
        return optim.SGD(stages, lr=LR, momentum=0.0)

    def rate_at(self, step, config):
        return LR


class OfNodes(Judged):
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


@pytest.fixture(scope="module", params=[Judged, OfNodes, Weighed])
def judged(request):
    """(task, losses): validation, then the loss of each step, then validation, by a loop over whole batches."""
    task, parts = request.param(), []
    for place, make in enumerate(task.layers(None)):
        with adapters.seeded(0, place):
            parts.append(make().double())
    parameters = [each for part in parts for each in part.parameters()]

    def loss(step, rows):
        x, target = task.batch(step, rows, None)
        x = tuple(map(torch.from_numpy, x))
        for part in parts:
            x = part(*x)
        return torch.nn.functional.mse_loss(x, torch.from_numpy(target)), len(x)

    def validation():
        with torch.no_grad():
            values = [loss(1_000_000 + index, range(BATCH)) for index in range(2)]
        return sum(float(value) * count for value, count in values) / sum(count for _, count in values)

    losses = [validation()]
    for step in range(STEPS):
        value, _ = loss(step, range(BATCH))
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
