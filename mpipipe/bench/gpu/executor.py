"""How well the executor keeps a GPU busy, with about a millisecond of work in each action.

A bare loop launches the kernels of a step's actions too. It does so as fast as the host can, to compare rates, and once
more queued behind other work, to measure the device time of nothing but the kernels.

Idle share = 1 - (device time of the step's kernels run back to back) / (device time of the step).
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from mpipipe import Pipeline, nn, schedules
from mpipipe.bench.gpu.rows import Row, normal, seconds, seconds_behind
from mpipipe.job import runtime
from mpipipe.job.types import Communicator

QUICK = dict(repeats=3, microbatches=8)


def measure(
    repeats: int = 10,
    rows: int = 4096,
    width: int = 8192,
    microbatches: int = 16,
    dtype: str = "bfloat16",
    comm: Communicator | None = None,
) -> Iterator[Row]:
    """Yield the rate of steps, and the share of their device time in which the GPU idles.

    `comm` has one rank; None is COMM_SELF.
    """
    stage = nn.Stage([nn.Linear(width, width)], dtype=dtype, device="cuda")
    schedule = schedules.one_f_one_b(1, microbatches)
    inputs, targets = ([normal((rows, width), dtype, seed + way) for seed in range(microbatches)] for way in (0, 1))
    kernels = nn.kernels.of("cuda")

    def bare() -> None:
        for x, target in zip(inputs, targets):
            y, saved = stage.forward(x)
            stage.backward(nn.mean_squared_error(y, target, 1 / microbatches)[1], saved)

    spans: list[float] = []
    filled: list[float] = []
    ahead: list[bool] = []
    comm = runtime.mpi().COMM_SELF if comm is None else comm
    with Pipeline([stage], schedule, comm, loss=nn.mean_squared_error) as pipeline:
        for _ in range(2):
            pipeline.step(inputs, targets)
        alone = seconds(bare, repeats)
        for _ in range(repeats):  # in turns: the GPU's clock rate changes with what it did before
            pipeline.step(inputs, targets)
            clock = pipeline.engine.executor.clock
            clock.settle()
            spans.append(clock.span)
            busy, always = seconds_behind(lambda: kernels.linear(inputs[0], inputs[-1]), bare, 1)
            filled.append(busy)
            ahead.append(always)
    span, busy = median(spans), median(filled)
    what = f"{2 * microbatches} actions of {busy / (2 * microbatches) * 1e3:.2f} ms"
    yield Row(f"executor, {what}: rate of the GPU", 1 / span, "steps/s", "the same kernels in a bare loop", 1 / alone,
              "at least 0.95")  # fmt: skip
    doubt = "" if all(ahead) else " (at least: the host was not ahead of the kernels alone)"
    yield Row(f"executor, {what}: GPU idle in a step{doubt}", 100 * (1 - busy / span), "%", goal="below 5")
