"""A graph network of PyTorch modules: the energy of a cloud of charges, from where they
are and what is near them.

Each cloud is a graph. Its nodes are charges, an edge goes from each one to each other
within REACH, and the energy is the sum of q q' / (1 + distance) over all edges. No two
graphs have the same numbers of nodes and edges. So the task says `per_microbatch`:
`batch` is called for the rows of one micro-batch, and makes one graph of all of theirs.

    mpiexec -n 4 python -m mpipipe train graphs.py --pipe 2 --steps 300 \\
        --batch 64 --lr 4e-3
"""

import numpy as np
import torch
from torch import nn

import mpipipe
from mpipipe import adapters

MOST, REACH = 9, 0.4  # charges of a cloud; the square that they lie in has sides of 1


def cloud(seed):
    """Draw the nodes (charges, 3), the edges (2, edges) and the energy of one graph."""
    draw = np.random.default_rng(seed)
    places = draw.uniform(0, 1, (draw.integers(2, MOST), 2))
    charges = draw.choice([-1.0, 1.0], len(places))
    distances = np.hypot(*(places[:, None] - places).transpose(2, 0, 1))
    edges = np.argwhere((distances < REACH) & ~np.eye(len(places), dtype=bool)).T
    source, sink = edges
    energy = (charges[source] * charges[sink] / (1 + distances[source, sink])).sum()
    return np.column_stack([charges, places]), edges, energy


class Embed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(3, width)

    # Graphs: the number of the graph that each node belongs to
    def forward(self, nodes, edges, graphs):
        return self.linear(nodes), edges, graphs


class Round(nn.Module):
    """Each node hears from its neighbours."""

    def __init__(self, width):
        super().__init__()
        self.message, self.update = (
            nn.Linear(2 * width, width),
            nn.Linear(2 * width, width),
        )

    def forward(self, nodes, edges, graphs):
        source, sink = edges
        messages = torch.tanh(self.message(torch.cat([nodes[source], nodes[sink]], 1)))
        sums = torch.zeros_like(nodes).index_add(0, sink, messages)
        return (
            nodes + torch.tanh(self.update(torch.cat([nodes, sums], 1))),
            edges,
            graphs,
        )


class Energy(nn.Module):
    """One number for each graph, from the sum over its nodes."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, nodes, edges, graphs):
        count = int(graphs.max()) + 1
        return self.linear(
            nodes.new_zeros(count, nodes.shape[1]).index_add(0, graphs, nodes)
        )


class Graphs(mpipipe.train.Task):
    unit, per_microbatch = "graphs", True
    width, rounds = 32, 3
    # A mean over graphs, which the targets are rows of
    loss = adapters.torch_loss(torch.nn.functional.mse_loss)

    def layers(self, shard):
        rounds = [lambda: Round(self.width) for _ in range(self.rounds)]
        return [lambda: Embed(self.width), *rounds, lambda: Energy(self.width)]

    def batch(self, step, rows, shard):
        nodes, edges, energies = zip(*(cloud((step, row)) for row in rows))
        sizes = [len(each) for each in nodes]
        starts = np.cumsum([0, *sizes[:-1]])
        joined = np.concatenate(
            [each + start for each, start in zip(edges, starts)], axis=1
        )
        inputs = np.concatenate(nodes), joined, np.repeat(np.arange(len(rows)), sizes)
        return inputs, np.array(energies)[:, None]

    def validation(self, index, rows, shard):
        return self.batch(1_000_000 + index, rows, shard)

    def show(self, output, target, shard):
        energies, truth = np.round(output[:4, 0], 2), np.round(target[:4, 0], 2)
        return f"energies of the first graphs: {energies}, in truth {truth}"
