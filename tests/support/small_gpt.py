"""A small GPT of the package, cut into stages for a schedule, and its gradients through a pipeline."""

from collections import Counter
from functools import cache

import numpy as np
from mpi4py import MPI

from mpipipe import Pipeline, arrays, nn
from mpipipe.attention import Local
from mpipipe.language.models import GPT
from mpipipe.schedules import gpipe, partition
from support import dense

MODEL = dict(vocab=32, dim=16, layers=5, heads=4, kv_heads=2, hidden=24, seq_len=12)
CUTS = [  # schedule, ranks, chunks
    ("gpipe", 1, 1), ("one_f_one_b", 1, 1), ("zero_bubble_h1", 1, 1), ("interleaved_1f1b", 1, 2), ("looped_bfs", 1, 3),
    ("gpipe", 2, 1), ("one_f_one_b", 2, 1), ("zero_bubble_h1", 2, 1), ("interleaved_1f1b", 2, 2), ("looped_bfs", 2, 2),
    ("interleaved_1f1b", 2, 3), ("looped_bfs", 2, 3), ("interleaved_zero_bubble", 2, 2), ("zero_bubble_2p", 2, 1),
    ("zero_bubble_v", 2, 2), ("dualpipe_v", 2, 2), ("v_half", 2, 2), ("v_min", 2, 2),
    ("gpipe", 4, 1), ("one_f_one_b", 4, 1), ("zero_bubble_h1", 4, 1), ("interleaved_1f1b", 4, 2), ("looped_bfs", 4, 2),
    ("interleaved_1f1b", 4, 3), ("looped_bfs", 4, 3), ("interleaved_zero_bubble", 4, 3), ("zero_bubble_2p", 4, 1),
    ("zero_bubble_v", 4, 2), ("dualpipe_v", 4, 2), ("v_half", 4, 2), ("v_min", 4, 2),
]  # fmt: skip


def text(rows, seed=1):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MODEL["vocab"], size=(rows, MODEL["seq_len"] + 1))
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def build(
    schedule, rank, dtype="float64", attend=None, token_positions=None, device="cpu", kind=nn.Stage, frozen=(), **sizes
):
    """This rank's stages; `sizes` are those of the model that differ from MODEL."""
    model = GPT(**{**MODEL, **sizes})
    layers = model.build(attend or Local(causal=True), token_positions)
    parts = partition(model.costs(), schedule.stages)
    cuts = [parts[number] for number in schedule.stages_of(rank)]
    keys = dict(dtype=dtype, seed=3, device=device, **(dict(frozen=frozen) if frozen else {}))
    return [kind(layers[start:stop], first=start, **keys) for start, stop in cuts]


def gradients(comm, schedule, rows=9, steps=1, recompute=False, scale=1.0, slice_lengths=None, **options):
    """({name: gradient} of this rank's stages after the last step, on the host; the loss)."""
    stages = build(schedule, comm.rank, **options)
    mine, how = dense.placed(schedule, comm.rank, *text(rows)), dict(recompute=recompute, slice_lengths=slice_lengths)
    with Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy, **how) as pipeline:
        for _ in range(steps):
            result = pipeline.step(*mine, scale=scale)
    return {name: arrays.download(stage.gradients[name]) for stage in stages for name in stage.gradients}, result.loss


@cache
def on_one_rank(microbatches, **options):
    """The same of one rank, which each makes once; `options` may be of any kind that a dict has as a key."""
    alone = MPI.COMM_SELF.Dup()
    found = gradients(alone, gpipe(1, microbatches), **options)
    alone.Free()
    return found


def parts_of(comm, size):
    """A communicator of `size` ranks that this rank is in, so that all ranks work at once."""
    return comm.Split(comm.rank // size, comm.rank)


def shared_out(comm, cuts):
    """(number, cut, communicator) of those of CUTS that the ranks of this one run: each is run by one part of them."""
    parts = {ranks: parts_of(comm, ranks) for ranks in (1, 2, 4) if comm.size % ranks == 0}
    turns = Counter()
    for number, cut in enumerate(cuts):
        ranks = cut[1]
        if ranks in parts:
            turns[ranks] += 1
            if turns[ranks] % (comm.size // ranks) == comm.rank // ranks:
                yield number, cut, parts[ranks]
    for part in parts.values():
        part.Free()
