"""The commands of python -m mpipipe bench."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mpipipe import processor
from mpipipe.comm import inprocess
from mpipipe.comm.abort import run_or_abort
from mpipipe.comm.group import group_of
from mpipipe.comm.types import Communicator
from mpipipe.errors import MpipipeError

app = typer.Typer(
    help="Measure against bare mpi4py, the simulation, and PyTorch where it is installed.", no_args_is_help=True
)
Repeats = Annotated[int, typer.Option(help="measured turns of each candidate; medians are shown", min=1)]


def _guarded(work: Callable[[], None]) -> NoReturn:
    """Run `work` so that an error on one rank ends the job, and exit with its code."""

    def limited() -> None:
        processor.prepare_process()
        work()

    raise typer.Exit(run_or_abort(limited))


@app.command()
def pipeline(repeats: Repeats = 100) -> None:
    """Cost of the machinery on tiny stages (mpiexec -n 2 python -m mpipipe bench pipeline)."""
    from mpipipe.cli.bench.pipeline import run

    _guarded(lambda: run(repeats))


@app.command()
def steps(repeats: Repeats = 30, microbatches: int = 4) -> None:
    """Steps with their optimizer, launched against one after the other (mpiexec -n 2 python -m mpipipe bench steps)."""
    from mpipipe.cli.bench.steps import run

    _guarded(lambda: run(repeats, microbatches))


@app.command()
def transport(repeats: Repeats = 50) -> None:
    """Mailbox against bare Isend and Irecv (mpiexec -n 2 python -m mpipipe bench transport)."""
    from mpipipe.cli.bench.transport import run

    _guarded(lambda: run(repeats))


@app.command()
def schedules() -> None:
    """Building, checking and simulating large schedules (python -m mpipipe bench schedules)."""
    from mpipipe.cli.bench.schedules import run

    run()


@app.command()
def gaps(seconds: Annotated[float, typer.Option(help="to search for each set of costs")] = 60.0) -> None:
    """How far searched schedules are from the best, for many sets of costs (python -m mpipipe bench gaps)."""
    from mpipipe.cli.bench.gaps import run

    run(seconds)


@app.command()
def train(
    repeats: Repeats = 3,
    dim: int = 512,
    layers: int = 8,
    heads: int = 8,
    seq_len: int = 256,
    microbatches: int = 8,
    rows: Annotated[int, typer.Option(help="sequences in a micro-batch")] = 4,
) -> None:
    """A GPT's step against its simulation (mpiexec -n 2 python -m mpipipe bench train)."""
    from mpipipe.cli.bench.train import run

    _guarded(lambda: run(repeats, dim, layers, heads, seq_len, microbatches, rows))


@app.command("dry-run")
def dry_run(config: Annotated[Path, typer.Argument(help="TOML file with keys of train", show_default=False)]) -> None:
    """Memory foreseen by train --dry-run against a training (mpiexec -n 4 python -m mpipipe bench dry-run job.toml)."""
    from mpipipe.cli.bench.dry_run import run
    from mpipipe.comm.group import group_of
    from mpipipe.train import TrainConfig

    def work() -> None:
        with group_of().together("bench: reading the configuration"):
            chosen = TrainConfig.load(str(config))
        run(chosen)

    _guarded(work)


@app.command()
def plan(
    configurations: Annotated[int, typer.Option(help="plans drawn at random", min=1)] = 40,
    repeats: Repeats = 5,
    seed: Annotated[int, typer.Option(help="of the drawing")] = 0,
    dim: int = 128,
    layers: int = 6,
    heads: int = 8,
    seq_len: int = 128,
    batch: Annotated[int, typer.Option(help="sequences in a step")] = 16,
) -> None:
    """Predicted steps of plans against real ones (mpiexec -n 2 python -m mpipipe bench plan)."""
    from mpipipe.cli.bench.plan import run
    from mpipipe.train import TrainConfig

    def work() -> None:
        with group_of().together("bench: the configuration"):
            config = TrainConfig(
                dim=dim, layers=layers, heads=heads, seq_len=seq_len, batch=batch, plan="auto", device="cpu"
            )
        run(configurations, repeats, seed, config)

    _guarded(work)


@app.command()
def checkpoint(
    repeats: Repeats = 3,
    gigabytes: Annotated[float, typer.Option(help="that all ranks save and load", min=1e-3)] = 1.0,
    folder: Annotated[Path, typer.Option(help="on the disk to be measured; a new folder in it is removed")] = Path("."),
    dim: int = 512,
    layers: int = 8,
    heads: int = 8,
    seq_len: int = 256,
) -> None:
    """Saving and loading against dd, and a training that saves at every step (mpiexec -n 4 ... bench checkpoint)."""
    from mpipipe.cli.bench.checkpoint import run
    from mpipipe.models import GPT

    _guarded(lambda: run(repeats, gigabytes, folder, GPT(dim=dim, layers=layers, heads=heads, seq=seq_len)))


@app.command()
def tokenize(
    text: Annotated[list[str], typer.Argument(help="files and folders of text", show_default=False)],
    tokenizer: Annotated[str, typer.Option(help="folder with a tokenizer.json", show_default=False)],
    repeats: Repeats = 5,
    end_of_text: Annotated[str | None, typer.Option(help="token behind each document", show_default=False)] = None,
) -> None:
    """Tokenizing against the library alone (mpiexec -n 2 python -m mpipipe bench tokenize --tokenizer DIR TEXT)."""
    from mpipipe.cli.bench.tokenize import run

    _guarded(lambda: run(repeats, text, tokenizer, end_of_text))


@app.command()
def attention(
    repeats: Repeats = 5,
    seq_len: Annotated[int, typer.Option(help="on one rank, for the kernels")] = 4096,
    ring_seq_len: Annotated[int, typer.Option(help="on several ranks, for the ring")] = 8192,
    heads: int = 4,
    head_dim: int = 64,
) -> None:
    """Attention kernels beside PyTorch, on several ranks a ring beside one (python -m mpipipe bench attention)."""
    from mpipipe.cli.bench.attention import run

    _guarded(lambda: run(repeats, seq_len, ring_seq_len, heads, head_dim))


@app.command()
def gpu(
    repeats: Annotated[int | None, typer.Option(help="measured turns; default: each part's own number", min=1)] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="memory, attention, ring, executor, gpt, on 2 ranks transport; repeatable; default: all"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="file to write the numbers to", show_default=False)] = None,
    peers: Annotated[bool, typer.Option(help="measure PyTorch beside it, where it is installed")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="smallest sizes that tell something")] = False,
) -> None:
    """Kernels, ring, executor and a GPT's step on a GPU; on 2 ranks the transports (python -m mpipipe bench gpu)."""
    from mpipipe.cli.bench.gpu.run import run, without_mpi

    def work(comm: Communicator | None = None) -> None:
        run(part or [], repeats, json, peers, quick, comm)

    reason = without_mpi()
    if reason is None:
        _guarded(work)
    print(f"mpipipe: on one rank without MPI: {reason}", file=sys.stderr)
    processor.prepare_process()
    try:
        inprocess.run(1, work)
    except MpipipeError as error:
        raise SystemExit(f"mpipipe: {type(error).__name__}: {error}") from None
