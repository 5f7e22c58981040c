"""Labels in a row, each as near as can be to what it names, and none upon another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """Labels that touch each other: which ones, where the first begins, and how long they are together."""

    members: list[int]
    start: float
    size: float


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Return the middles of labels of these sizes that lie within low .. high, near to where they are wanted.

    Labels that want the same place stand in the order given. Where all together are longer than there is room, they
    begin at `low`.
    """
    blocks: list[Block] = []
    for label in sorted(range(len(wanted)), key=lambda label: wanted[label]):
        block = _block([label], wanted, sizes, low, high)
        while blocks and blocks[-1].start + blocks[-1].size > block.start:
            block = _block([*blocks.pop().members, *block.members], wanted, sizes, low, high)
        blocks.append(block)
    middles = [0.0] * len(wanted)
    for block in blocks:
        place = block.start
        for label in block.members:
            middles[label] = place + sizes[label] / 2
            place += sizes[label]
    return middles


def _block(members: list[int], wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> Block:
    """Place labels without gaps so that on average none is off to one side."""
    before, offsets = 0.0, []
    for label in members:
        offsets.append(wanted[label] - before - sizes[label] / 2)
        before += sizes[label]
    mean = sum(offsets) / len(offsets)
    return Block(members, max(low, min(mean, high - before)), before)
