"""The machinery of the pipeline on small stages: its cost, steps without a barrier between them, its messages."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mpipipe import Pipeline, nn, optim, schedules
from mpipipe.arrays import Array
from mpipipe.bench.timing import compare, report
from mpipipe.comm import DeviceTransport, Envelope, HostTransport, Mailbox
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator, MpiCommunicator, runtime
from mpipipe.text import counted

# -- `bench pipeline`: what the machinery costs, on stages so small that nothing else counts ---------------------------
#
# Two ranks, one 64-wide float32 linear stage per chunk, 32 micro-batches of 4 rows. The peer is the same order of work
# written by hand with mpi4py calls and nothing around them, in the same run.


WIDTH, ROWS, MICROBATCHES = 64, 4, 32


def run_pipeline(repeats: int = 30) -> None:
    """Print a line for each schedule: microseconds per micro-batch (forward + backward), and the ratio."""
    comm = runtime.world()
    if comm.size != 2:
        raise ArgumentError("bench pipeline", found=counted(comm.size, "rank"), expected="2 ranks")
    for schedule in (schedules.one_f_one_b(2, MICROBATCHES), schedules.interleaved_1f1b(2, 2, MICROBATCHES)):
        ours, hand = _PipelineStep(comm, schedule), _HandWrittenStep(comm, schedule)
        times = compare(comm, [ours, hand], repeats)
        ours.close()
        scale = 1e6 / MICROBATCHES
        report(
            comm,
            f"pipeline {schedule.name} x {schedule.chunks}",
            f"{times[0] * scale:.1f} us, by hand {times[1] * scale:.1f} us per micro-batch",
            times[0] / times[1],
            "at most 3",
        )


def _batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (ROWS * MICROBATCHES, WIDTH)
    return rng.standard_normal(shape, dtype=np.float32), rng.standard_normal(shape, dtype=np.float32)


class _PipelineStep:
    """A step of the pipeline."""

    def __init__(self, comm: Communicator, schedule: schedules.Schedule) -> None:
        stages = [nn.Stage([nn.Linear(WIDTH, WIDTH)], first=s) for s in schedule.stages_of(comm.rank)]
        self.pipeline = Pipeline(stages, schedule, comm, loss=nn.mean_squared_error)
        inputs, targets = _batch()
        self.inputs = inputs if schedule.placement[0] == comm.rank else None
        self.targets = targets if schedule.placement[-1] == comm.rank else None
        self.close = self.pipeline.close

    def __call__(self) -> None:
        self.pipeline.step(self.inputs, self.targets)


class _HandWrittenStep:
    """The same actions with bare mpi4py: receive, multiply, send. Buffers and tags are laid out beforehand."""

    def __init__(self, comm: MpiCommunicator, schedule: schedules.Schedule) -> None:
        self.comm, chunks = comm, schedule.chunks
        rng = np.random.default_rng(comm.rank)
        self.weights = [rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / 8 for _ in range(chunks)]
        self.biases = [np.zeros(WIDTH, np.float32) for _ in range(chunks)]
        self.dweights = [np.zeros((WIDTH, WIDTH), np.float32) for _ in range(chunks)]
        self.dbiases = [np.zeros(WIDTH, np.float32) for _ in range(chunks)]
        inputs, targets = _batch()
        self.inputs = np.split(inputs, MICROBATCHES)
        self.targets = np.split(targets, MICROBATCHES)
        self.activations = np.empty((chunks, MICROBATCHES, ROWS, WIDTH), np.float32)
        self.gradients = np.empty((chunks, MICROBATCHES, ROWS, WIDTH), np.float32)
        last = schedule.stages - 1
        self.actions = [
            (op == "F", stage // 2, m, stage == 0, stage == last, stage * MICROBATCHES + m)
            for stage, op, m in schedule.orders[comm.rank]
        ]
        self.tag_shift = schedule.stages * MICROBATCHES

    def __call__(self) -> None:
        comm, peer = self.comm, 1 - self.comm.rank
        sends: list[tuple[Any, np.ndarray]] = []
        loss_gradients: dict[int, np.ndarray] = {}
        arrived: dict[tuple[int, int], np.ndarray] = {}
        for gradient in (*self.dweights, *self.dbiases):
            gradient.fill(0)
        for forward, chunk, m, first, last, tag in self.actions:
            weight = self.weights[chunk]
            if forward:
                x = self.inputs[m]
                if not first:
                    x = self.activations[chunk, m]
                    comm.Recv(x, peer, tag)
                arrived[chunk, m] = x
                y = x @ weight.T
                y += self.biases[chunk]
                if last:
                    difference = y - self.targets[m]
                    np.vdot(difference, difference) / difference.size
                    difference *= 2 / difference.size / MICROBATCHES
                    loss_gradients[m] = difference
                else:
                    sends.append((comm.Isend(y, peer, tag + MICROBATCHES), y))
            else:
                if last:
                    dy = loss_gradients.pop(m)
                else:
                    dy = self.gradients[chunk, m]
                    comm.Recv(dy, peer, tag + self.tag_shift)
                x = arrived.pop((chunk, m))
                self.dweights[chunk] += dy.T @ x
                self.dbiases[chunk] += dy.sum(0)
                if not first:
                    dx = dy @ weight
                    sends.append((comm.Isend(dx, peer, tag - MICROBATCHES + self.tag_shift), dx))
        for request, _ in sends:
            request.Wait()


# -- `bench steps`: what it is worth that no barrier stands between steps ----------------------------------------------
#
# A loop of steps with their optimizer, by `step` and by `launch`, takes turns in one run. Each chunk is one float32
# linear stage, 512 wide, with 16 rows in a micro-batch: so AdamW takes as long as some actions do. Without clipping no
# rank needs another one for its update, and ends of steps overlap with begins of the next ones; with clipping the ranks
# meet at the norm.


STEP_WIDTH, STEP_ROWS, STEPS = 512, 16, 8


def run_steps(repeats: int = 30, microbatches: int = 4) -> None:
    """Print a line for each schedule, without and with clipping: milliseconds of a step, and the ratio."""
    comm = runtime.world()
    if comm.size < 2:
        raise ArgumentError("bench steps", found="1 rank", expected="at least 2 ranks")
    for schedule in (
        schedules.one_f_one_b(comm.size, microbatches),
        schedules.zero_bubble_h1(comm.size, microbatches),
        schedules.zero_bubble_v(comm.size, microbatches),
    ):
        loop = _Loop(comm, schedule)
        for max_norm in (None, 1.0):
            by_step, by_launch = partial(loop.steps, max_norm), partial(loop.launches, max_norm)
            times = [seconds * 1e3 / STEPS for seconds in compare(comm, [by_step, by_launch], repeats)]
            report(
                comm,
                f"steps {schedule.name}, {'no clipping' if max_norm is None else 'clipping'}",
                f"launch {times[1]:.2f} ms, step {times[0]:.2f} ms",
                times[1] / times[0],
                "at most 1",
            )
        loop.pipeline.close()


class _Loop:
    """A small training, by either method."""

    def __init__(self, comm: Communicator, schedule: schedules.Schedule) -> None:
        stages = [nn.Stage([nn.Linear(STEP_WIDTH, STEP_WIDTH)], first=s) for s in schedule.stages_of(comm.rank)]
        self.comm, self.pipeline = comm, Pipeline(stages, schedule, comm, loss=nn.mean_squared_error)
        self.optimizer = optim.AdamW(stages, lr=1e-4)
        batch = np.random.default_rng(0).standard_normal(
            (STEP_ROWS * schedule.microbatches, STEP_WIDTH), dtype=np.float32
        )
        self.inputs = batch if schedule.placement[0] == comm.rank else None
        self.targets = batch if schedule.placement[-1] == comm.rank else None
        self.scaler = optim.LossScaler(1.0, dynamic=False)

    def steps(self, max_norm: float | None) -> None:
        """Let every step end on all ranks before the next one begins."""
        for _ in range(STEPS):
            self.pipeline.step(self.inputs, self.targets)
            if max_norm is None:
                self.optimizer.step()
            else:
                optim.scaled_step(self.optimizer, self.scaler, max_norm, comm=self.comm)

    def launches(self, max_norm: float | None) -> None:
        """Ask for the loss of a step while the next one is under way."""
        pending = None
        for _ in range(STEPS):
            launched = self.pipeline.launch(self.inputs, self.targets)
            update = optim.begin_step(self.optimizer, max_norm, comm=self.comm)
            if pending is not None:
                pending.wait()
            update.wait()
            pending = launched


# -- `bench transport`: messages through the mailbox against bare Isend and Irecv, over a range of sizes ---------------
#
# Two ranks play ping-pong. The bare candidate posts a receive, sends, and waits, with buffers laid out beforehand: two
# for receiving, in turn, since a pipeline still reads one array while the next arrives.


SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24)


def run_transport(repeats: int = 50) -> None:
    """Print a line for each size: microseconds a message, GB/s, and the ratio of bandwidths."""
    comm = runtime.world()
    if comm.size != 2:
        raise ArgumentError("bench transport", found=counted(comm.size, "rank"), expected="2 ranks")
    transport = HostTransport(comm)
    for size in SIZES:
        count = max(2, min(200, (1 << 23) // size))
        ours, bare = PingPong(comm, transport, np.ones(size // 8), count), _Bare(comm, size, count)
        times = [seconds / (2 * count) for seconds in compare(comm, [ours, bare], repeats)]
        report(
            comm,
            f"transport {size:>9} B",
            f"{times[0] * 1e6:9.2f} us {size / times[0] / 1e9:6.2f} GB/s, bare {times[1] * 1e6:9.2f} us "
            f"{size / times[1] / 1e9:6.2f} GB/s, difference {1e6 * (times[0] - times[1]):6.2f} us",
            times[1] / times[0],
            "bandwidth; at least 0.95 from 1 MiB on, at most 6 us more at 8 B",
        )
    transport.close()


class PingPong:
    """`count` turns of an array from rank 0 to rank 1 and back, through a mailbox.

    comm : two ranks
    transport : of `comm`
    array : what is sent
    """

    def __init__(
        self, comm: Communicator, transport: HostTransport | DeviceTransport, array: Array, count: int
    ) -> None:
        self.rank, self.mailbox = comm.rank, Mailbox(transport)
        self.envelopes = [Envelope(1 - comm.rank, 1, m, 0, (0, 0), (0, 1)) for m in range(count)]
        self.array = array
        leaf = (array.shape, array.dtype)
        self.schedule = self.mailbox.receive_schedule(self.envelopes, [[leaf]] * count)

    def __call__(self) -> None:
        """Play all turns."""
        mailbox, array = self.mailbox, self.array
        mailbox.begin_call(self.schedule, 1)
        for envelope in self.envelopes:
            if self.rank == 0:
                mailbox.put(envelope, [array])
            mailbox.release(mailbox.take()[1])
            if self.rank == 1:
                mailbox.put(envelope, [array])
        mailbox.flush()


class _Bare:
    """The same turns with bare mpi4py."""

    def __init__(self, comm: MpiCommunicator, size: int, count: int) -> None:
        self.comm, self.count = comm, count
        self.sent, self.received = np.ones(size // 8), [np.empty(size // 8), np.empty(size // 8)]

    def __call__(self) -> None:
        comm, peer, sent, received = self.comm, 1 - self.comm.rank, self.sent, self.received
        for turn in range(self.count):
            arriving = comm.Irecv(received[turn % 2], peer, 1)
            if comm.rank == 0:
                leaving = comm.Isend(sent, peer, 1)
                arriving.Wait()
            else:
                arriving.Wait()
                leaving = comm.Isend(sent, peer, 1)
            leaving.Wait()
