"""Micro-batches of other shapes: graphs of different sizes in lists, which share no axis of rows.

The judge is dense numpy: all graphs of a step as one matrix of neighbours.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from mpipipe import Mesh, Pipeline
from mpipipe.errors import ArgumentError, PeerError
from mpipipe.schedules import gpipe, interleaved_1f1b, one_f_one_b

WIDTH, MICROBATCHES = 3, 4


class Round:
    """y = tanh((x + sum over neighbours) W), next to edges and the graph of each node, which are integers."""

    def __init__(self, number):
        self.weight = np.random.default_rng(number).normal(size=(WIDTH, WIDTH))
        self.gradients = SimpleNamespace(flat=np.zeros(WIDTH * WIDTH))

    def forward(self, x):
        nodes, edges, graphs = x
        total = nodes.copy()
        np.add.at(total, edges[1], nodes[edges[0]])
        y = np.tanh(total @ self.weight)
        return (y, edges, graphs), (total, y, edges)

    def backward(self, dy, saved):
        total, y, edges = saved
        assert dy[1] is None and dy[2] is None
        inner = dy[0] * (1 - y**2)
        self.gradients.flat += (total.T @ inner).ravel()
        slope = inner @ self.weight.T
        dx = slope.copy()
        np.add.at(dx, edges[0], slope[edges[1]])
        return dx, None, None


def of_graphs(output, target):
    """The mean over graphs of the squared sum over nodes, and how many graphs there are."""
    nodes, _, graphs = output
    sums = np.zeros((len(target), WIDTH))
    np.add.at(sums, graphs, nodes)
    slope = 2 * (sums - target) / len(target)
    return float(((sums - target) ** 2).sum() / len(target)), (slope[graphs], None, None), len(target)


def unweighed(output, target):
    return of_graphs(output, target)[:2]


def drawn(seed, replicas=1):
    """Micro-batches of graphs (nodes, edges, graphs) and targets; one has no edges."""
    rng, inputs, targets = np.random.default_rng(seed), [], []
    for number in range(replicas * MICROBATCHES):
        sizes = rng.integers(1, 5, size=rng.integers(1, 4))
        graphs = np.repeat(np.arange(len(sizes)), sizes)
        first = np.concatenate([[0], sizes.cumsum()])
        pairs = [(a, b) for n in graphs for a in range(first[n], first[n + 1]) for b in range(first[n], first[n + 1])]
        edges = np.array([pair for pair in pairs if number and rng.random() < 0.4], np.int64).reshape(-1, 2).T.copy()
        inputs.append((rng.normal(size=(len(graphs), WIDTH)), edges, graphs))
        targets.append(rng.normal(size=(len(sizes), WIDTH)))
    return inputs, targets


def judged(stages, inputs, targets):
    """(loss, gradients by stage, input gradients) of all graphs as one, with a dense matrix of neighbours."""
    nodes, goal = np.concatenate([x for x, _, _ in inputs]), np.concatenate(targets)
    near, pool = np.eye(len(nodes)), np.zeros((len(goal), len(nodes)))
    at, graph = 0, 0
    for (x, edges, graphs), target in zip(inputs, targets):
        for source, sink in edges.T:
            near[at + sink, at + source] += 1
        pool[graph + graphs, at + np.arange(len(x))] = 1
        at, graph = at + len(x), graph + len(target)
    kept, weights = [nodes], [Round(number).weight for number in range(stages)]
    for weight in weights:
        kept.append(np.tanh(near @ kept[-1] @ weight))
    error = pool @ kept[-1] - goal
    dy, gradients = 2 * pool.T @ error / len(goal), [np.zeros(0)] * stages
    for number in reversed(range(stages)):
        inner = dy * (1 - kept[number + 1] ** 2)
        gradients[number] = ((near @ kept[number]).T @ inner).ravel()
        dy = near.T @ inner @ weights[number].T
    return (error**2).sum() / len(goal), gradients, dy


@pytest.mark.parametrize("loss", [of_graphs, unweighed], ids=["weights", "rows"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [one_f_one_b, lambda n, m: interleaved_1f1b(n, 2, m)], ids=["1f1b", "interleaved"])
def test_graphs_are_trained_as_one_matrix(comm, make, recompute, loss):
    """Each graph counts alike, by the weights of the loss or by the rows of the targets; each step has other shapes."""
    schedule = make(comm.size, MICROBATCHES)
    numbers = schedule.stages_of(comm.rank)
    stages = [Round(number) for number in numbers]
    with Pipeline(stages, schedule, comm, loss=loss, recompute=recompute) as pipeline:
        for seed in range(3):
            inputs, targets = drawn(seed)
            expected, gradients, slopes = judged(schedule.stages, inputs, targets)
            last = schedule.stages - 1 in numbers
            result = pipeline.step(inputs if 0 in numbers else None, targets if last else None)
            assert result.loss == pytest.approx(expected, rel=1e-12)
            for number, stage in zip(numbers, stages):
                np.testing.assert_allclose(stage.gradients.flat, gradients[number], rtol=1e-11, atol=1e-13)
            if 0 in numbers:
                found = np.concatenate([dx for dx, _, _ in result.input_grads])
                np.testing.assert_allclose(found, slopes, rtol=1e-11, atol=1e-13)


@pytest.mark.mpi(min_size=2)
def test_graphs_of_replicas_count_alike(comm):
    with Mesh(comm, pipe=1) as mesh:
        stage, (inputs, targets) = Round(0), drawn(7, comm.size)
        expected, gradients, _ = judged(1, inputs, targets)
        mine = slice(comm.rank * MICROBATCHES, (comm.rank + 1) * MICROBATCHES)
        with Pipeline([stage], gpipe(1, MICROBATCHES), mesh.pipe, unweighed, replicas=mesh.replicas) as pipeline:
            assert pipeline.step(inputs[mine], targets[mine]).loss == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(stage.gradients.flat, gradients[0], rtol=1e-11, atol=1e-13)


NOTHING = {
    "nodes": (0, (np.zeros((0, WIDTH)), np.zeros((2, 0), np.int64), np.zeros(0, np.int64))),
    "graphs": (1, np.zeros((0, WIDTH))),
}


@pytest.mark.parametrize("name", NOTHING)
def test_an_empty_micro_batch_is_one_error_on_all_ranks_before_the_step(comm, name):
    part, empty = NOTHING[name]
    inputs, targets = drawn(0)
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    with Pipeline([Round(comm.rank)], one_f_one_b(comm.size, MICROBATCHES), comm, loss=of_graphs) as pipeline:
        (inputs, targets)[part][2] = empty
        with pytest.raises(ArgumentError, match="an empty micro-batch") as caught:
            pipeline.step(inputs if first else None, targets if last else None)
        assert caught.value.microbatch == 2
        inputs, targets = drawn(0)
        pipeline.step(inputs if first else None, targets if last else None)


def test_targets_without_rows_need_weights(comm):
    """Nothing says what a mean over nodes and graphs at once is a mean over."""
    inputs, targets = drawn(0)
    several = [(target, np.zeros(len(x))) for target, (x, _, _) in zip(targets, inputs)]
    first, last = comm.rank == 0, comm.rank == comm.size - 1

    def losses(output, target):
        return of_graphs(output, target[0])

    batch = inputs if first else None, several if last else None
    with Pipeline([Round(comm.rank)], one_f_one_b(comm.size, MICROBATCHES), comm, loss=losses) as pipeline:
        assert pipeline.step(*batch).loss == pytest.approx(judged(comm.size, inputs, targets)[0], rel=1e-12)
    bare = lambda output, target: losses(output, target)[:2]  # noqa: E731
    with pytest.raises((ArgumentError, PeerError), match="does not say what its value is a mean over"):
        Pipeline([Round(comm.rank)], one_f_one_b(comm.size, MICROBATCHES), comm, loss=bare).step(*batch)
