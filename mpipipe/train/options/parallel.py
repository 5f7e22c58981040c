"""Options of a training: ranks, stages, schedule."""

from __future__ import annotations

from dataclasses import dataclass

from mpipipe.train.options.option import option


@dataclass(frozen=True)
class ParallelOptions:
    """Ranks, stages, schedule."""

    pipe: int | None = option(None, "ranks of one pipeline; default: all that seq leaves", least=1)
    seq: int = option(1, "ranks that share each sequence, by ring attention; a replica has pipe x seq ranks", least=1)
    layout: str = option("zigzag", "which positions each of them holds", choices=("zigzag", "contiguous", "striped"))
    schedule: str = option(
        "one_f_one_b",
        "schedule; others: gpipe, interleaved_1f1b, looped_bfs, zero_bubble_h1, zero_bubble_2p, "
        "interleaved_zero_bubble; with chunks 2: zero_bubble_v, dualpipe_v, v_half, v_min",
    )
    chunks: int = option(1, "stages on each rank", least=1)
    microbatches: int | None = option(None, "micro-batches of a step in each replica; default: 4 per rank", least=1)
    recompute: bool = option(False, "keep only stage inputs, and run each forward again before its backward")
    recompute_limit: int | None = option(
        None, "activations of stages that a rank may hold; as many forwards as that needs are run again", least=1
    )
    device: str = option(
        "auto", "cpu, cuda, or auto: a GPU for each rank where all of them see one", choices=("auto", "cpu", "cuda")
    )
