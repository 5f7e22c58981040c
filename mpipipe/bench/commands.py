"""The commands of python -m mpipipe bench."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from mpipipe import processor
from mpipipe.cli import Operand, refusing
from mpipipe.job import Communicator, group_of, inprocess, run_or_abort
from mpipipe.options import Option

Repeats = Annotated[int, Option("measured turns of each candidate; medians are shown", least=1)]


def _guarded(work: Callable[[], None]) -> int:
    """Run `work` so that an error on one rank ends the job, and exit with its code."""

    def limited() -> None:
        processor.prepare_process()
        work()

    return run_or_abort(limited)


def pipeline(repeats: Repeats = 100) -> int:
    """Cost of the machinery on tiny stages (mpiexec -n 2 python -m mpipipe bench pipeline)."""
    from mpipipe.bench.pipeline import run_pipeline

    return _guarded(lambda: run_pipeline(repeats))


def steps(repeats: Repeats = 30, microbatches: int = 4) -> int:
    """Steps with their optimizer, launched against one after the other (mpiexec -n 2 python -m mpipipe bench steps)."""
    from mpipipe.bench.pipeline import run_steps

    return _guarded(lambda: run_steps(repeats, microbatches))


def transport(repeats: Repeats = 50) -> int:
    """Mailbox against bare Isend and Irecv (mpiexec -n 2 python -m mpipipe bench transport)."""
    from mpipipe.bench.pipeline import run_transport

    return _guarded(lambda: run_transport(repeats))


def schedules() -> None:
    """Building, checking and simulating large schedules (python -m mpipipe bench schedules)."""
    from mpipipe.bench.schedules import run_large

    run_large()


def gaps(seconds: Annotated[float, Option("to search for each set of costs")] = 60.0) -> None:
    """How far searched schedules are from the best, for many sets of costs (python -m mpipipe bench gaps)."""
    from mpipipe.bench.schedules import run_gaps

    run_gaps(seconds)


def train(
    repeats: Repeats = 3,
    dim: int = 512,
    layers: int = 8,
    heads: int = 8,
    seq_len: int = 256,
    microbatches: int = 8,
    rows: Annotated[int, Option("sequences in a micro-batch")] = 4,
) -> int:
    """A GPT's step against its simulation (mpiexec -n 2 python -m mpipipe bench train)."""
    from mpipipe.bench.train import run_train

    return _guarded(lambda: run_train(repeats, dim, layers, heads, seq_len, microbatches, rows))


def dry_run(config: Annotated[Path, Operand("TOML file with keys of train")]) -> int:
    """Memory foreseen by train --dry-run against a training (mpiexec -n 4 python -m mpipipe bench dry-run job.toml)."""
    from mpipipe.bench.train import run_dry_run
    from mpipipe.job import group_of
    from mpipipe.train import TrainConfig

    def work() -> None:
        with group_of().raise_together("bench: reading the configuration"):
            chosen = TrainConfig.load(str(config))
        run_dry_run(chosen)

    return _guarded(work)


def plan(
    configurations: Annotated[int, Option("plans drawn at random", least=1)] = 40,
    repeats: Repeats = 5,
    seed: Annotated[int, Option("of the drawing")] = 0,
    dim: int = 128,
    layers: int = 6,
    heads: int = 8,
    seq_len: int = 128,
    batch: Annotated[int, Option("sequences in a step")] = 16,
) -> int:
    """Predicted steps of plans against real ones (mpiexec -n 2 python -m mpipipe bench plan)."""
    from mpipipe.bench.train import run_plan
    from mpipipe.train import TrainConfig

    def work() -> None:
        with group_of().raise_together("bench: the configuration"):
            config = TrainConfig(
                dim=dim, layers=layers, heads=heads, seq_len=seq_len, batch=batch, plan="auto", device="cpu"
            )
        run_plan(configurations, repeats, seed, config)

    return _guarded(work)


def checkpoint(
    repeats: Repeats = 3,
    gigabytes: Annotated[float, Option("that all ranks save and load", least=1e-3)] = 1.0,
    folder: Annotated[Path, Option("on the disk to be measured; a new folder in it is removed")] = Path("."),
    dim: int = 512,
    layers: int = 8,
    heads: int = 8,
    seq_len: int = 256,
) -> int:
    """Saving and loading against dd, and a training that saves at every step (mpiexec -n 4 ... bench checkpoint)."""
    from mpipipe.bench.files import run_checkpoint
    from mpipipe.language.models import GPT

    return _guarded(
        lambda: run_checkpoint(repeats, gigabytes, folder, GPT(dim=dim, layers=layers, heads=heads, seq=seq_len))
    )


def tokenize(
    text: Annotated[list[str], Operand("files and folders of text")],
    tokenizer: Annotated[str, Option("folder with a tokenizer.json")],
    repeats: Repeats = 5,
    end_of_text: Annotated[str | None, Option("token behind each document")] = None,
) -> int:
    """Tokenizing against the library alone (mpiexec -n 2 python -m mpipipe bench tokenize --tokenizer DIR TEXT)."""
    from mpipipe.bench.files import run_tokenize

    return _guarded(lambda: run_tokenize(repeats, text, tokenizer, end_of_text))


def attention(
    repeats: Repeats = 5,
    seq_len: Annotated[int, Option("on one rank, for the kernels")] = 4096,
    ring_seq_len: Annotated[int, Option("on several ranks, for the ring")] = 8192,
    heads: int = 4,
    head_dim: int = 64,
) -> int:
    """Attention kernels next to PyTorch, on several ranks a ring next to one (python -m mpipipe bench attention)."""
    from mpipipe.bench.attention import run

    return _guarded(lambda: run(repeats, seq_len, ring_seq_len, heads, head_dim))


def gpu(
    repeats: Annotated[int | None, Option("measured turns; default: each part's own number", least=1)] = None,
    part: Annotated[
        list[str] | None,
        Option("memory, products, attention, ring, executor, gpt, on 2 ranks transport; repeatable; default: all"),
    ] = None,
    json: Annotated[Path | None, Option("file to write the numbers to")] = None,
    peers: Annotated[bool, Option("measure PyTorch beside it, where it is installed")] = True,
    quick: Annotated[bool, Option("smallest sizes that tell something")] = False,
) -> int:
    """Kernels, ring, executor and a GPT's step on a GPU; on 2 ranks the transports (python -m mpipipe bench gpu)."""
    from mpipipe.bench.gpu.run import run, without_mpi

    def work(comm: Communicator | None = None) -> None:
        run(part or [], repeats, json, peers, quick, comm)

    reason = without_mpi()
    if reason is None:
        return _guarded(work)
    print(f"mpipipe: on one rank without MPI: {reason}", file=sys.stderr)
    processor.prepare_process()
    with refusing():
        inprocess.run(1, work)
    return 0
