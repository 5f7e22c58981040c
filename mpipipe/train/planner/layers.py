"""Measures layers: seconds of their actions, bytes that they keep, and the optimizer.

Each rank runs small pipelines of its own, with one or two layers of each kind of the model, embedding and head among
them, while all other ranks do the same: they share the memory's bandwidth as in a training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mpipipe.comm.group import group_of
from mpipipe.planning import RankCosts, Sizes
from mpipipe.train.planner.probe import Probe
from mpipipe.train.planner.scene import Scene

ROUNDS = 3  # in which all sizes of micro-batches take turns, so that all of them see the same machine
ALIKE = 2  # layers of a kind that are measured


@dataclass
class Measured:
    """What one rank has found.

    Attributes
    ----------
    costs, sizes : for each size of micro-batch
    optimizer, sums : seconds for one parameter
    alone : time of a step while no other rank computes, as a share of what it is while all do
    """

    costs: dict[int, RankCosts]
    sizes: dict[int, Sizes]
    optimizer: float
    sums: float
    alone: float


def measure_layers(scene: Scene) -> Measured:
    """Measure all kinds of layers on this rank; collective over all ranks."""
    group = group_of(scene.mesh.comm)
    solo = group.split(scene.mesh.rank, 0, "plan: a rank by itself")
    probes = {size: Probe(scene, solo, _picked(scene.kinds), size) for size in scene.space.sizes}
    for _ in range(ROUNDS):
        for probe in probes.values():
            probe.run()
    found = Measured(
        costs={size: probe.costs() for size, probe in probes.items()},
        sizes={size: probe.sizes() for size, probe in probes.items()},
        optimizer=median(seconds for probe in probes.values() for seconds in probe.optimizers),
        sums=median(seconds for probe in probes.values() for seconds in probe.sums),
        alone=probes[scene.space.sizes[len(probes) // 2]].alone(),
    )
    group.agree("plan: all ranks have measured the layers")
    solo.Free()
    return found


def _picked(kinds: Sequence[int]) -> list[int]:
    """Return the layers to measure: the first ones of each kind, and the last one."""
    return [
        place for place, kind in enumerate(kinds) if list(kinds[:place]).count(kind) < ALIKE or place == len(kinds) - 1
    ]
