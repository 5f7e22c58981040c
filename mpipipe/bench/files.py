"""Files that are written and read: checkpoints next to dd, tokens next to the library tokenizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Annotated

import numpy as np

from mpipipe import Mesh, Pipeline, checkpoint, nn, optim, schedules
from mpipipe.attention import Local
from mpipipe.bench.timing import Call, Repeats, compare, on_ranks, report
from mpipipe.cli import Operand
from mpipipe.errors import BackendError
from mpipipe.job import group_of, runtime
from mpipipe.language.data import (
    THREADS,
    TextReader,
    batches_of,
    chunks_of,
    list_texts,
    open_tokenizer,
    share_threads,
    tokenize,
)
from mpipipe.language.models import GPT
from mpipipe.options import Option
from mpipipe.text import counted

# -- `bench checkpoint`: saving and loading against dd on the same disk, and a training that saves at every step -------
#
# Every rank writes as many bytes as its dd does, at the same time. What is read was dropped from the system's cache.


ARRAYS = 8  # of each rank


@on_ranks
def save_and_load(
    repeats: Repeats = 3,
    gigabytes: Annotated[float, Option("that all ranks save and load", least=1e-3)] = 1.0,
    folder: Annotated[Path, Option("on the disk to be measured; a new folder in it is removed")] = Path("."),
    dim: int = 512,
    layers: int = 8,
    heads: int = 8,
    seq_len: int = 256,
) -> None:
    """Saving and loading against dd, and a training that saves at every step (mpiexec -n 4 ... bench checkpoint)."""
    comm, model = runtime.world(), GPT(dim=dim, layers=layers, heads=heads, seq=seq_len)
    group, place = group_of(comm), None
    with group.raise_together("bench: the folder"):
        if comm.rank == 0:
            if shutil.which("dd") is None:
                raise BackendError("dd is not found", remedy="install coreutils")
            place = Path(tempfile.mkdtemp(prefix="mpipipe-bench-", dir=folder)).absolute()
    place = group.broadcast("bench: the folder", place)
    try:
        with Mesh(comm, pipe=comm.size) as mesh:
            rate = _beside_dd(mesh, place, int(gigabytes * 1e9 / comm.size), repeats)
            for rows, microbatches, text in ((4, 8, "long steps"), (1, 2, "short steps")):
                _train_and_save(mesh, place, model, rows, microbatches, repeats=repeats, text=text, rate=rate)
    finally:
        if comm.rank == 0:
            shutil.rmtree(place, ignore_errors=True)


def _beside_dd(mesh: Mesh, place: Path, nbytes: int, repeats: int) -> float:
    """Report saving and loading, and return the bytes per second of dd in writing."""
    random, size = np.random.default_rng(mesh.rank), nbytes // ARRAYS // 4
    parameters = {f"{mesh.rank}.{n}": random.random(size, dtype=np.float32) for n in range(ARRAYS)}
    stage, nbytes = SimpleNamespace(parameters=parameters), ARRAYS * size * 4
    whole, plain = nbytes * mesh.comm.size, place / f"dd-{mesh.rank}"
    mine = place / "step-00000001" / f"part-{mesh.rank}.safetensors"

    def dd(*arguments: str) -> None:
        subprocess.run(["dd", "bs=8M", "status=none", *arguments], check=True)

    def remove() -> None:
        plain.unlink(missing_ok=True)
        mine.unlink(missing_ok=True)
        os.sync()

    def forget() -> None:
        """Drop a file that is on the disk from the system's cache."""
        with open(mine, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def beside(what: str, ours: Call, theirs: Call, before: Call) -> float:
        seconds = compare(mesh.comm, [ours, theirs], repeats, 1, before=before)
        mine, other = (whole / each / 1e6 for each in seconds)
        measured = f"{whole / 1e9:.2f} GB in {seconds[0]:.2f} s, {mine:.0f} MB/s; dd {other:.0f} MB/s"
        name = f"checkpoint {what}, {counted(mesh.comm.size, 'rank')}"
        report(mesh.comm, name, measured, mine / other, "at least 0.8")
        return whole / seconds[1]

    save = partial(checkpoint.save, place, mesh, [stage], step=1)
    write = partial(dd, "if=/dev/zero", f"of={plain}", f"count={nbytes}", "iflag=count_bytes,fullblock", "conv=fsync")
    rate = beside("save", save, write, remove)
    save()
    plain.unlink(missing_ok=True)
    beside("load", partial(checkpoint.load, place, mesh, [stage]), partial(dd, f"if={mine}", "of=/dev/null"), forget)
    shutil.rmtree(mine.parent, ignore_errors=True)
    return rate


def _train_and_save(
    mesh: Mesh, place: Path, model: GPT, rows: int, microbatches: int, *, repeats: int, text: str, rate: float
) -> None:
    """Report the step of a GPT with a checkpoint at each step, next to steps without."""
    comm, group = mesh.comm, group_of(mesh.comm)
    schedule = schedules.one_f_one_b(comm.size, microbatches)
    start, stop = schedules.partition(model.costs(), comm.size)[comm.rank]
    stages = [nn.Stage(model.build(Local(causal=True))[start:stop], first=start)]
    optimizer = optim.AdamW(stages, lr=1e-4)
    tokens = np.random.default_rng(0).integers(0, model.vocab, size=(2, microbatches * rows, model.seq))
    inputs, targets = tokens[0] if comm.rank == 0 else None, tokens[1] if comm.rank == comm.size - 1 else None
    steps: dict[bool, list[float]] = {False: [], True: []}  # seconds, without and with a checkpoint
    held: list[float] = []
    with (
        Pipeline(stages, schedule, mesh.pipe, loss=nn.softmax_cross_entropy) as pipeline,
        checkpoint.Saver(place / text.split()[0], mesh, stages, optimizer, keep=1) as saver,
    ):
        for turn in range(4 * repeats + 1):  # `repeats` steps without, `repeats` with, twice
            saves = turn > 0 and (turn - 1) // repeats % 2 == 1
            if not saves:
                saver.wait()
            group.agree("bench: the start of a step")
            begin, waited = perf_counter(), saver.waited
            pipeline.step(inputs, targets)
            optimizer.step()
            group.agree("bench: the end of a step")
            stall = perf_counter()
            saver.poll()
            if saves:
                saver.save(turn)
            end = perf_counter()
            times = group.gather("bench: a step", (end - begin, end - stall + saver.waited - waited))
            if turn:
                steps[saves].append(max(seconds for seconds, _ in times))
            if saves:
                held.append(max(seconds for _, seconds in times))
    nbytes = sum(group.gather("bench: the bytes", sum(3 * stage.parameters.flat.nbytes for stage in stages)))
    with_saves, without = median(steps[True]), median(steps[False])
    report(
        comm,
        f"checkpoint at every step, {text}, {counted(comm.size, 'rank')}, {nbytes / 1e6:.0f} MB",
        f"{with_saves:.3f} s a step, without {without:.3f} s; held up for {median(held):.4f} s, "
        f"{100 * median(held) / without:.2f} % of a step; {nbytes / with_saves / 1e6:.0f} MB/s, "
        f"dd {rate / 1e6:.0f} MB/s",
        with_saves / max(without, nbytes / rate),
        "to the longer one of a step and dd; held up for at most 1 % where the disk keeps up",
    )


# -- `bench tokenize`: text to a file of tokens, against the library tokenizers alone with as many threads -------------
#
# The library gets the same texts, in memory already, in one call on each rank; what it returns is thrown away. `mpipipe
# tokenize` also reads them, writes the file, and lets ranks agree. Both open the tokenizer anew in each turn, since it
# keeps the words that it has met. The processors' time has that of ranks that wait for others, which poll.


WARMUP = 1


@on_ranks
def tokens(
    text: Annotated[list[str], Operand("files and folders of text")],
    tokenizer: Annotated[str, Option("folder with a tokenizer.json")],
    repeats: Repeats = 5,
    end_of_text: Annotated[str | None, Option("token after each document")] = None,
) -> None:
    """Tokenizing against the library alone (mpiexec -n 2 python -m mpipipe bench tokenize --tokenizer DIR TEXT)."""
    comm = runtime.world()
    group = group_of(comm)
    share_threads(group)
    entries = list_texts(text, group)
    with group.raise_together("bench: the texts"):
        reader = TextReader(open_tokenizer(tokenizer, end_of_text))
        mine = batches_of(chunks_of(entries))[comm.rank :: comm.size]
        own = [passage.text for batch in mine for chunk in batch for passage in reader.passages(chunk)]
    folder = group.broadcast("bench: a folder", tempfile.mkdtemp(prefix="mpipipe-") if comm.rank == 0 else None)
    spent, turns = {"library": 0.0, "tokenize": 0.0}, count()

    def by_processor(name: str, work: Callable[[], object]) -> None:
        start = process_time()
        work()
        spent[name] += process_time() - start

    def library() -> None:
        open_tokenizer(tokenizer, end_of_text).library.encode_batch(own, add_special_tokens=False)  # with empty caches

    def ours() -> None:
        tokenize(text, tokenizer, str(Path(folder, str(next(turns)))), comm, end=end_of_text)

    candidates = [partial(by_processor, "library", library), partial(by_processor, "tokenize", ours)]
    try:
        seconds = compare(comm, candidates, repeats, WARMUP)
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    everyone = group.gather("bench: the processors' time", spent)
    alone, whole = (sum(each[name] for each in everyone) / (WARMUP + repeats) for name in ("library", "tokenize"))
    size = sum(entry[1] for entry in entries) / 1e6
    name = f"tokenize, {counted(comm.size, 'rank')} x {os.environ.get(THREADS, 'all')} threads, {size:.1f} MB"
    rates = f"{size / seconds[1]:.2f} MB/s, library alone {size / seconds[0]:.2f} MB/s"
    report(comm, name, rates, seconds[0] / seconds[1], "at least 0.9")
    report(comm, f"{name}, by the processors' time", f"{whole:.2f} s, library alone {alone:.2f} s", alone / whole)
