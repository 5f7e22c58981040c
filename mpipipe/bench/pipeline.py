"""The machinery of the pipeline on small stages: what it costs, and its messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpipipe import Pipeline, adapters, nn, schedules
from mpipipe.bench.timing import Repeats, compare, on_ranks, report
from mpipipe.comm import Envelope, HostTransport, Mailbox
from mpipipe.errors import ArgumentError
from mpipipe.job import Communicator, MpiCommunicator, runtime
from mpipipe.text import counted

try:
    import torch
except ImportError:  # then one row is left out
    torch = None

# -- `bench pipeline`: what the machinery costs, on stages so small that nothing else counts -------
#
# Two ranks, one 64-wide float32 linear stage per chunk, 32 micro-batches of 4 rows. The peer is the
# same order of work written by hand with mpi4py calls and nothing around them, in the same run.


WIDTH = 64
ROWS = 4
MICROBATCHES = 32


@on_ranks
def pipeline(repeats: Repeats = 100) -> None:
    """Cost of the machinery on tiny stages (mpiexec -n 2 python -m mpipipe bench pipeline)."""
    comm = _two_ranks("pipeline")
    for schedule in (
        schedules.one_f_one_b(2, MICROBATCHES),
        schedules.interleaved_1f1b(2, 2, MICROBATCHES),
    ):
        linear = _Linears(comm, schedule)
        hand = _HandWrittenStep(comm, schedule, linear.batch)
        scale = 1e6 / MICROBATCHES
        ours, by_hand = compare(comm, [linear.step, hand], repeats)
        linear.pipeline.close()
        report(
            comm,
            f"pipeline {schedule.name} x {schedule.chunks}",
            f"{ours * scale:.1f} us, by hand {by_hand * scale:.1f} us per micro-batch",
            ours / by_hand,
            "at most 3",
        )
    if torch is not None:
        _torch_stage(comm, repeats)


def _torch_stage(comm: MpiCommunicator, repeats: int) -> None:
    """Compare stages of one module of PyTorch with hand-written messages and autograd."""
    schedule = schedules.one_f_one_b(2, MICROBATCHES)
    torch.set_num_threads(1)
    modules = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    loss = adapters.torch_loss(torch.nn.functional.mse_loss)
    batch = np.random.default_rng(0).standard_normal((ROWS * MICROBATCHES, WIDTH), dtype=np.float32)
    inputs, targets = (batch if rank == comm.rank else None for rank in range(2))
    with Pipeline([adapters.torch_stage(modules[0])], schedule, comm, loss=loss) as pipeline:
        hand = _HandWrittenTorch(comm, schedule, modules[1], batch)
        ours, by_hand = compare(comm, [lambda: pipeline.step(inputs, targets), hand], repeats)
    scale = 1e6 / MICROBATCHES
    report(
        comm,
        "pipeline of torch_stage",
        f"{ours * scale:.1f} us, by hand {by_hand * scale:.1f} us per micro-batch",
        ours / by_hand,
        "at most 1.6",
    )


class _HandWrittenTorch:
    """The actions of 1F1B on two ranks with a bare module, autograd and mpi4py."""

    def __init__(
        self, comm: MpiCommunicator, schedule: schedules.Schedule, module: Any, batch: np.ndarray
    ) -> None:
        self.comm = comm
        self.module = module
        self.parts = [torch.from_numpy(part) for part in np.split(batch, MICROBATCHES)]
        self.activations, self.gradients = np.empty((2, MICROBATCHES, ROWS, WIDTH), np.float32)
        self.actions = [(op, m) for _, op, m in schedule.orders[comm.rank]]

    def __call__(self) -> None:
        comm = self.comm
        forward = {}
        sends: list[tuple[Any, np.ndarray]] = []
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for op, m in self.actions:
            if op == "F" and comm.rank == 0:
                y = forward[m] = self.module(self.parts[m])
                sent = y.detach().numpy()
                sends.append((comm.Isend(sent, 1, m), sent))
            elif op == "F":
                comm.Recv(self.activations[m], 0, m)
                x = torch.from_numpy(self.activations[m]).requires_grad_()
                loss = torch.nn.functional.mse_loss(self.module(x), self.parts[m]) / MICROBATCHES
                loss.item()
                forward[m] = x, loss
            elif comm.rank == 0:
                comm.Recv(self.gradients[m], 1, MICROBATCHES + m)
                forward.pop(m).backward(torch.from_numpy(self.gradients[m]))
            else:
                x, loss = forward.pop(m)
                loss.backward()
                sent = x.grad.numpy()
                sends.append((comm.Isend(sent, 0, MICROBATCHES + m), sent))
        for request, _ in sends:
            request.Wait()


def _two_ranks(name: str) -> MpiCommunicator:
    comm = runtime.world()
    if comm.size != 2:
        raise ArgumentError(f"bench {name}", found=counted(comm.size, "rank"), expected="2 ranks")
    return comm


class _Linears:
    """A pipeline in which each chunk is one linear stage."""

    def __init__(self, comm: Communicator, schedule: schedules.Schedule) -> None:
        stages = [
            nn.Stage([nn.Linear(WIDTH, WIDTH)], first=s) for s in schedule.stages_of(comm.rank)
        ]
        self.pipeline = Pipeline(stages, schedule, comm, loss=nn.mean_squared_error)
        self.batch = np.random.default_rng(0).standard_normal(
            (ROWS * schedule.microbatches, WIDTH), dtype=np.float32
        )
        ends = schedule.placement[0], schedule.placement[-1]
        self.inputs, self.targets = (self.batch if rank == comm.rank else None for rank in ends)

    def step(self) -> None:
        """Run a step without an optimizer."""
        self.pipeline.step(self.inputs, self.targets)


class _HandWrittenStep:
    """The same actions with bare mpi4py, with buffers and tags laid out before."""

    def __init__(
        self, comm: MpiCommunicator, schedule: schedules.Schedule, batch: np.ndarray
    ) -> None:
        self.comm = comm
        chunks = schedule.chunks
        weights = (
            np.random.default_rng(comm.rank).standard_normal(
                (chunks, WIDTH, WIDTH), dtype=np.float32
            )
            / 8
        )
        self.weights = list(weights)
        self.dweights = list(np.zeros_like(weights))
        self.biases, self.dbiases = (list(np.zeros((chunks, WIDTH), np.float32)) for _ in range(2))
        self.inputs = self.targets = np.split(batch, MICROBATCHES)
        self.activations, self.gradients = np.empty(
            (2, chunks, MICROBATCHES, ROWS, WIDTH), np.float32
        )
        last = schedule.stages - 1
        self.actions = [
            (op == "F", stage // 2, m, stage == 0, stage == last, stage * MICROBATCHES + m)
            for stage, op, m in schedule.orders[comm.rank]
        ]
        self.tag_shift = schedule.stages * MICROBATCHES

    def __call__(self) -> None:
        comm = self.comm
        peer = 1 - self.comm.rank
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


# -- `bench transport`: messages through the mailbox, against bare Isend and Irecv -----------------
#
# Two ranks play ping-pong. The bare candidate posts a receive, sends, and waits, with buffers laid
# out beforehand: two for receiving, in turn, since a pipeline still reads one array while the next
# arrives.


SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24)


@on_ranks
def transport(repeats: Repeats = 50) -> None:
    """Mailbox against bare Isend and Irecv (mpiexec -n 2 python -m mpipipe bench transport)."""
    comm = _two_ranks("transport")
    host = HostTransport(comm)
    for size in SIZES:
        count = max(2, min(200, (1 << 23) // size))
        ours = _PingPong(comm, host, np.ones(size // 8), count)
        bare = _Bare(comm, size, count)
        ours_took, bare_took = (
            seconds / (2 * count) for seconds in compare(comm, [ours, bare], repeats)
        )
        rates = (
            f"{took * 1e6:9.2f} us {size / took / 1e9:6.2f} GB/s" for took in (ours_took, bare_took)
        )
        report(
            comm,
            f"transport {size:>9} B",
            f"{', bare '.join(rates)}, difference {1e6 * (ours_took - bare_took):6.2f} us",
            bare_took / ours_took,
            "bandwidth; at least 0.95 from 1 MiB on, at most 6 us more at 8 B",
        )
    host.close()


class _PingPong:
    """`count` turns of an array from rank 0 to rank 1 and back, through a mailbox."""

    def __init__(
        self, comm: Communicator, transport: HostTransport, array: np.ndarray, count: int
    ) -> None:
        self.rank = comm.rank
        self.mailbox = Mailbox(transport)
        self.envelopes = [Envelope(1 - comm.rank, 1, m, 0, (0, 0), (0, 1)) for m in range(count)]
        self.array = array
        self.schedule = self.mailbox.receive_schedule(
            self.envelopes, [[(array.shape, array.dtype)]] * count
        )

    def __call__(self) -> None:
        mailbox = self.mailbox
        array = self.array
        mailbox.begin_call(self.schedule, 1)
        for envelope in self.envelopes:
            if self.rank == 0:
                mailbox.put(envelope, [array])
            mailbox.release([mailbox.take()])
            if self.rank == 1:
                mailbox.put(envelope, [array])
        mailbox.flush()


class _Bare:
    """The same turns with bare mpi4py."""

    def __init__(self, comm: MpiCommunicator, size: int, count: int) -> None:
        self.comm = comm
        self.count = count
        self.sent = np.ones(size // 8)
        self.received = [np.empty(size // 8), np.empty(size // 8)]

    def __call__(self) -> None:
        comm = self.comm
        peer = 1 - self.comm.rank
        sent = self.sent
        received = self.received
        for turn in range(self.count):
            arriving = comm.Irecv(received[turn % 2], peer, 1)
            if comm.rank == 0:
                leaving = comm.Isend(sent, peer, 1)
                arriving.Wait()
            else:
                arriving.Wait()
                leaving = comm.Isend(sent, peer, 1)
            leaving.Wait()
