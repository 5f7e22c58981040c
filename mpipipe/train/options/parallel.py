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
        "interleaved_zero_bubble; with chunks 2: zero_bubble_v, dualpipe_v, v_half, v_min; or FILE.csv with an order, "
        "such as simulate --out writes",
    )
    chunks: int = option(1, "stages on each rank", least=1)
    microbatches: int | None = option(
        None, "micro-batches of a step in each replica; default: 4 per rank, or those of FILE.csv", least=1
    )
    partition: str | None = option(
        None, "layers of each stage, such as 3,2,2,3; default: stages with an even share of the operations"
    )
    recompute: bool = option(False, "keep only stage inputs, and run each forward again before its backward")
    recompute_limit: int | None = option(
        None, "activations of stages that a rank may hold; as many forwards as that needs are run again", least=1
    )
    plan: str = option(
        "no",
        "auto: measure for a moment, and take the fastest schedule, chunks, micro-batches, partition and recomputation",
        choices=("no", "auto"),
    )
    memory_limit: str | None = option(
        None, "with a plan: bytes that a rank may need for parameters, optimizer and activations, such as 900M or 1.5G"
    )
    fixed: tuple[str, ...] = option(
        (), "option that a plan leaves as it is, such as schedule; repeatable; those that are given stay anyway"
    )
    device: str = option(
        "auto", "cpu, cuda, or auto: a GPU for each rank where all of them see one", choices=("auto", "cpu", "cuda")
    )
