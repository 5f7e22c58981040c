"""How well the executor keeps a GPU busy, with about a millisecond of work in each action.

The work of a step's actions, forwards and then backwards, is launched by a bare loop as well: as fast as the host can,
and all of it behind other work, so that nothing but the kernels is in its device time. Idle is the share of the
pipeline's step, by the device's clock, that those kernels do not fill: it holds what the host takes to launch a kernel
that the device waits for, wherever that falls.
"""

from __future__ import annotations

from statistics import median

from mpipipe import Pipeline, nn, schedules
from mpipipe.cli.bench.gpu.rows import Row
from mpipipe.cli.bench.gpu.timing import normal, seconds, seconds_behind
from mpipipe.comm import runtime

QUICK = dict(repeats=3, microbatches=8)


def measure(repeats=10, rows=4096, width=8192, microbatches=16, dtype="bfloat16", comm=None):
    """Yield the rate of steps and the share of their device time in which the GPU idles.

    comm : of one rank; None: COMM_SELF
    """
    stage = nn.Stage([nn.Linear(width, width)], dtype=dtype, device="cuda")
    schedule = schedules.one_f_one_b(1, microbatches)
    inputs, targets = ([normal((rows, width), dtype, seed + way) for seed in range(microbatches)] for way in (0, 1))
    kernels = nn.kernels.of("cuda")

    def bare():
        for x, target in zip(inputs, targets):
            y, saved = stage.forward(x)
            stage.backward(nn.mean_squared_error(y, target, 1 / microbatches)[1], saved)

    spans, filled, ahead = [], [], []
    comm = runtime.mpi().COMM_SELF if comm is None else comm
    with Pipeline([stage], schedule, comm, loss=nn.mean_squared_error) as pipeline:
        for _ in range(2):
            pipeline.step(inputs, targets)
        alone = seconds(bare, repeats)
        for _ in range(repeats):  # in turns: the GPU's clock rate changes with what it did before
            pipeline.step(inputs, targets)
            clock = pipeline.executor.clock
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
