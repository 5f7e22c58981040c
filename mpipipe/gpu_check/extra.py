"""python -m mpipipe.gpu_check.extra PART ...: asks the real libraries for what neither tests nor `bench gpu` ask.

    attention  cuDNN, for sizes that models have: which kernel computes, and its results next to numpy's in float32
    graphs     trainings by CUDA graphs: losses and gradients next to those without, the number of graphs, seconds
    nccl       NCCL on one rank: a communicator, a sum in place on its stream, its end
    memory     memory that runs out in the middle of a step: the report, and a step after it

All of it is on a stream of its own, as a training is. It prints a line for each, and exits with 1 where one is wrong.
Attention by another kernel than cuDNN's is wrong, unless MPIPIPE_ATTENTION=cupy asks for that.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpipipe import Pipeline, arrays, nn, optim, schedules
from mpipipe.attention import Local, kernels
from mpipipe.comm import Channel, new_identity
from mpipipe.errors import BackendError, StageError
from mpipipe.job import Communicator, inprocess, settings
from mpipipe.language.models import GPT


class Finding(NamedTuple):
    """What was asked, whether the answer is right, and what was seen."""

    what: str
    right: bool
    seen: str

    def __str__(self) -> str:
        return f"{self.what}: {'ok' if self.right else 'WRONG'}; {self.seen}"


SIZES = ((128, 64), (128, 128), (1024, 64), (1024, 128))  # (sequence, head dimension)
HEADS, KV_HEADS, BATCH = 4, 2, 2
# Norm of the errors over the norm of the result, in eps. Weights, slopes, the output that the backward reads, and each
# result are rounded once to half precision, by eps / 2 at most; the rest is in float32.
ROUNDINGS = 4.0


def attention(_comm: Communicator) -> Iterator[Finding]:
    """Yield the kernel, and the largest error of four results in each case: causal, two query heads for a key head."""
    described = kernels.describe()
    right = described.startswith("cudnn") or os.environ.get(kernels.VARIABLE) == "cupy"
    yield Finding("attention by", right, described)
    warnings.filterwarnings("error", message="cuDNN refuses")
    for seq, dim in SIZES:
        for dtype in ("bfloat16", "float16"):
            kind, generator = arrays.dtype(dtype), np.random.default_rng(seq + dim)
            whole = [
                generator.standard_normal((BATCH, seq, heads, dim), np.float32).astype(kind)
                for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
            ]
            found = _results([arrays.upload(x) for x in whole])
            expected = _results([x.astype(np.float32) for x in whole])
            error = max(_distance(one, other) for one, other in zip(found, expected))
            allowed = ROUNDINGS * float(ml_dtypes.finfo(kind).eps)
            seen = f"error {error:.2e}, at most {allowed:.2e}"
            yield Finding(f"{dtype} sequence {seq} dim {dim}", error <= allowed, seen)


def _results(whole: list) -> list[np.ndarray]:
    """Return out, dq, dk and dv on the host."""
    attend = Local(causal=True)
    out, saved = attend.forward(*whole[:3])
    return arrays.download(out, *attend.backward(whole[3], saved))


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    apart = np.linalg.norm(found.astype(np.float64) - expected.astype(np.float64))
    return float(apart / np.linalg.norm(expected.astype(np.float64)))


MODEL = GPT(vocab=8192, dim=768, layers=4, heads=12, seq=512, tied=True)
MICROBATCHES = 4
STEPS = 6
MANY_ROWS, ROOM = 64, 64 << 20  # rows of a micro-batch that does not fit into what one row needs and so many bytes more
SUMMED = 1 << 20  # elements
SCHEDULES = (schedules.gpipe, schedules.one_f_one_b, schedules.zero_bubble_h1)
# cuBLAS may take another algorithm for its workspace in a recording, and AdamW makes much of last bits
APART = {"float32": 1e-3, "bfloat16": 5e-2}


class Trained(NamedTuple):
    """A short training: its losses, its last gradients, why stages have no graphs, their number, seconds of a step."""

    losses: list[float]
    gradients: np.ndarray
    reason: str
    graphs: int
    seconds: float


def graphs(comm: Communicator) -> Iterator[Finding]:
    """Yield for each schedule and dtype whether a training by CUDA graphs is the one without."""
    for dtype, most in APART.items():
        for schedule in SCHEDULES:
            plan = schedule(1, MICROBATCHES)
            plain, found = (_train(comm, plan, dtype, wanted) for wanted in (False, True))
            apart = np.linalg.norm(found.gradients - plain.gradients) / np.linalg.norm(plain.gradients)
            alike = apart <= most and np.allclose(found.losses, plain.losses, rtol=most)
            same = plain.losses == found.losses and np.array_equal(plain.gradients, found.gradients)
            seen = [
                "the same bits" if same else f"gradients apart by {apart:.2e}, last losses {plain.losses[-1]:.6f} and "
                f"{found.losses[-1]:.6f}",
                found.reason or f"{found.graphs} graphs",
                f"{plain.seconds * 1e3:.2f} ms a step without, {found.seconds * 1e3:.2f} ms with",
            ]  # fmt: skip
            right = bool(alike and found.graphs and not found.reason)
            yield Finding(f"CUDA graphs, {plan.name}, {dtype}", right, ", ".join(seen))


def _train(comm: Communicator, plan: schedules.Schedule, dtype: str, by_graphs: bool) -> Trained:
    inputs, targets = _tokens(MICROBATCHES)
    losses, seconds = [], []
    with settings.using_graphs(by_graphs), _pipeline(comm, plan, dtype) as pipeline:
        (adapter,) = pipeline.engine.partners.stages
        stage = adapter.given
        stage.optimizer_writes_compute()
        optimizer, scaler = optim.AdamW([stage], 1e-4), optim.LossScaler(1.0, dynamic=False)
        for _ in range(STEPS):
            arrays.stream().synchronize()
            start = perf_counter()
            losses.append(pipeline.step(inputs, targets, scale=scaler.scale).loss)
            optim.scaled_step(optimizer, scaler, max_norm=1.0, comm=comm)
            arrays.stream().synchronize()
            seconds.append(perf_counter() - start)
        reason, count = (adapter.computes.reason, adapter.computes.recorded) if by_graphs else ("", 0)
        gradients = arrays.download(stage.gradients.flat).astype(np.float64)
    return Trained(losses, gradients, reason, count, median(seconds[STEPS // 2 :]))


def _pipeline(comm: Communicator, plan: schedules.Schedule, dtype: str) -> Pipeline:
    stage = nn.Stage(MODEL.build(Local(causal=True)), dtype=dtype, seed=3, device="cuda")
    return Pipeline([stage], plan, comm, loss=nn.softmax_cross_entropy)


def _tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, MODEL.vocab, size=(2, rows, MODEL.seq))


def nccl(_comm: Communicator) -> Iterator[Finding]:
    """Yield whether a communicator of one rank adds in place on its stream, and can be freed."""
    what = "NCCL on one rank"
    try:
        library = arrays.nccl()
    except BackendError as error:
        yield Finding(what, True, f"not there ({error.message}): sums and messages go by MPI")
        return
    values = np.arange(SUMMED, dtype=np.float32)
    array = arrays.upload(values)
    arrays.stream().synchronize()  # the first operation waits for no event

    def add(communicator: Any, stream: int) -> None:
        place = arrays.address(array)
        communicator.allReduce(place, place, array.size, library.NCCL_FLOAT32, library.NCCL_SUM, stream)

    start = perf_counter()
    channel = Channel(1, 0, new_identity(), add)
    opened = perf_counter() - start
    done = channel.put(add, [arrays.record()])
    channel.check()
    done.synchronize()
    right = bool((arrays.download(array) == values).all())
    channel.close()
    yield Finding(what, right, f"version {library.get_version()}, a communicator in {opened:.2f} s, two sums in place")


def memory(comm: Communicator) -> Iterator[Finding]:
    """Yield whether memory that runs out in a step gives the report of it, and whether a step works after that."""
    pool, plan = arrays.cupy().get_default_memory_pool(), schedules.gpipe(1, 1)
    small, large = _tokens(1), _tokens(MANY_ROWS)
    try:
        with _pipeline(comm, plan, "bfloat16") as pipeline:
            pipeline.step(*small)
            pool.set_limit(size=pool.total_bytes() + ROOM)
            pipeline.step(*large)
        report, right = "none, though its pool was limited", False
    except StageError as error:
        report = " ".join(str(error).split())
        right = "ran out of memory on the GPU" in report and error.microbatch is not None
    finally:
        pool.set_limit(size=0)
    yield Finding("the report of a full GPU", right, report)
    with _pipeline(comm, plan, "bfloat16") as pipeline:
        loss = pipeline.step(*small).loss
    yield Finding("a step after that", bool(np.isfinite(loss)), f"loss {loss:.6f}")


PARTS: dict[str, Callable[[Communicator], Iterator[Finding]]] = {
    "attention": attention, "graphs": graphs, "nccl": nccl, "memory": memory,
}  # fmt: skip


def main(*names: str) -> int:
    """Print a line for each finding of some parts. Returns 1 where one is wrong or a part has failed, else 0."""
    wrong: list[str] = []

    def work(comm: Communicator) -> None:
        arrays.check_device("cuda")
        for name in names:
            try:
                with arrays.own_stream(), warnings.catch_warnings():
                    for finding in PARTS[name](comm):
                        print(finding, flush=True)
                        wrong.extend([] if finding.right else [str(finding)])
            except Exception as error:  # the other parts go on
                traceback.print_exc()
                wrong.append(f"{name}: WRONG; it has failed, see above: {error}")
                print(wrong[-1], flush=True)

    inprocess.run(1, work)
    print(f"{len(wrong)} wrong: {wrong[0]}" if wrong else "all as expected")  # the last line is what a report shows
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or PARTS)))
