"""Logical times of actions: whole numbers by which each rank proves that its own order cannot deadlock.

A logical time (Lamport 1978, "Time, Clocks, and the Ordering of Events") rises along the order of each rank, and from
each action to the action that waits for its output. F, B and I have one; R and W wait for their own rank alone and need
none. The formulas below give it for schedules that loop over the ranks, so that no rank needs the orders of the others.

Let a group of G micro-batches pass V chunks on P ranks. Rank r runs the k-th F of all groups at 2k + dr, and the k-th
backward d(P-1-r) places behind the F that stands before it. Here d is 1, or 2 where the warm-up shrinks by two F's from
rank to rank. A group of fewer than P micro-batches leaves gaps, as if it had P.
"""

from __future__ import annotations


def grouped(ranks: int, chunks: int, microbatches: int, step: int, stage: int, backward: bool, microbatch: int) -> int:
    """Return the logical time in a schedule that takes micro-batches in groups through the chunks of a rank."""
    chunk, rank = divmod(stage, ranks)
    size, longer = divmod(microbatches, max(1, microbatches // ranks))  # as even_split: the longer ones come first
    first = max(ranks, size + (longer > 0))
    if microbatch < longer * (size + 1):
        width, place = max(ranks, size + 1), microbatch % (size + 1)
    else:
        width, place = max(ranks, size), (microbatch - longer) % size
    start = chunks * (microbatch - place)
    if not backward:
        return 2 * (start + chunk * width + place) + step * rank
    behind = (chunks - 1) * first + step * (ranks - 1)
    return 2 * (start + (chunks - 1 - chunk) * width + place + behind) - step * rank + 1


def breadth_first(
    ranks: int, chunks: int, microbatches: int, lifo: bool, stage: int, backward: bool, microbatch: int
) -> int:
    """Return the logical time in a schedule whose chunks take all micro-batches forward, and then all of them back."""
    chunk, rank = divmod(stage, ranks)
    width = max(ranks, microbatches)
    if not backward:
        return chunk * width + microbatch + rank
    place = microbatches - 1 - microbatch if lifo else microbatch
    return 2 * chunks * width + (chunks - 1 - chunk) * width + place + ranks - 1 - rank
