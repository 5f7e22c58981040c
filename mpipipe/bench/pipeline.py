"""The machinery of the pipeline on small stages: what it costs, and its messages."""

from __future__ import annotations

import numpy as np

from mpipipe import Pipeline, adapters, nn, schedules
from mpipipe.bench.timing import Call, Repeats, compare, on_ranks, report
from mpipipe.comm import Envelope, Mailbox, Transport
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
        stages = []
        for number in schedule.stages_of(comm.rank):
            stages.append(nn.Stage([nn.Linear(WIDTH, WIDTH)], first=number))
        with Pipeline(stages, schedule, comm, loss=nn.mean_squared_error) as pipeline:
            hand = _hand_written(comm, schedule)
            _compare(comm, repeats, f"{schedule.name} x {schedule.chunks}", pipeline, hand, 3)
    if torch is not None:
        _torch_stage(comm, repeats)


def _batch() -> np.ndarray:
    shape = (ROWS * MICROBATCHES, WIDTH)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _compare(
    comm: Communicator, repeats: int, what: str, pipeline: Pipeline, hand: Call, goal: float
) -> None:
    """Report a step of a pipeline, without an optimizer, next to one by hand."""
    batch = _batch()
    placement = pipeline.schedule.placement
    inputs = targets = None
    if placement[0] == comm.rank:
        inputs = batch
    if placement[-1] == comm.rank:
        targets = batch
    ours, by_hand = compare(comm, [lambda: pipeline.step(inputs, targets), hand], repeats)
    scale = 1e6 / MICROBATCHES
    report(
        comm,
        f"pipeline {what}",
        f"{ours * scale:.1f} us, by hand {by_hand * scale:.1f} us per micro-batch",
        ours / by_hand,
        f"at most {goal}",
    )


def _torch_stage(comm: MpiCommunicator, repeats: int) -> None:
    """Compare stages of one module of PyTorch with hand-written messages and autograd."""
    schedule = schedules.one_f_one_b(2, MICROBATCHES)
    torch.set_num_threads(1)
    stage = adapters.torch_stage(torch.nn.Linear(WIDTH, WIDTH))
    loss = adapters.torch_loss(torch.nn.functional.mse_loss)
    with Pipeline([stage], schedule, comm, loss=loss) as pipeline:
        hand = _hand_written_torch(comm, schedule, torch.nn.Linear(WIDTH, WIDTH))
        _compare(comm, repeats, "of torch_stage", pipeline, hand, 1.6)


def _hand_written_torch(
    comm: MpiCommunicator, schedule: schedules.Schedule, module: torch.nn.Module
) -> Call:
    """Return the actions of 1F1B on two ranks with a bare module, autograd and mpi4py."""
    parts = [*map(torch.from_numpy, np.split(_batch(), MICROBATCHES))]
    activations, gradients = np.empty((2, MICROBATCHES, ROWS, WIDTH), np.float32)

    def step() -> None:
        forward = {}
        sends = []
        module.zero_grad()
        for _, op, m in schedule.orders[comm.rank]:
            if op == "F" and comm.rank == 0:
                y = forward[m] = module(parts[m])
                sent = y.detach().numpy()
                sends.append((comm.Isend(sent, 1, m), sent))
            elif op == "F":
                comm.Recv(activations[m], 0, m)
                x = torch.from_numpy(activations[m]).requires_grad_()
                loss = torch.nn.functional.mse_loss(module(x), parts[m]) / MICROBATCHES
                loss.item()
                forward[m] = x, loss
            elif comm.rank == 0:
                comm.Recv(gradients[m], 1, MICROBATCHES + m)
                forward.pop(m).backward(torch.from_numpy(gradients[m]))
            else:
                x, loss = forward.pop(m)
                loss.backward()
                sent = x.grad.numpy()
                sends.append((comm.Isend(sent, 0, MICROBATCHES + m), sent))
        for request, _ in sends:
            request.Wait()

    return step


def _two_ranks(name: str) -> MpiCommunicator:
    comm = runtime.world()
    if comm.size != 2:
        raise ArgumentError(f"bench {name}", found=counted(comm.size, "rank"), expected="2 ranks")
    return comm


def _hand_written(comm: MpiCommunicator, schedule: schedules.Schedule) -> Call:
    """Return the same actions with bare mpi4py, with buffers and tags laid out before."""
    chunks = schedule.chunks
    peer = 1 - comm.rank
    normal = np.random.default_rng(comm.rank).standard_normal
    weights = list(normal((chunks, WIDTH, WIDTH), dtype=np.float32) / 8)
    dweights = list(map(np.zeros_like, weights))
    biases, dbiases = np.zeros((2, chunks, WIDTH), np.float32)
    batch = np.split(_batch(), MICROBATCHES)
    activations, gradients = np.empty((2, chunks, MICROBATCHES, ROWS, WIDTH), np.float32)
    last = schedule.stages - 1
    shift = schedule.stages * MICROBATCHES
    actions = []
    for stage, op, m in schedule.orders[comm.rank]:
        tag = stage * MICROBATCHES + m
        actions.append((op == "F", stage // 2, m, stage == 0, stage == last, tag))

    def step() -> None:
        sends = []
        loss_gradients: dict[int, np.ndarray] = {}
        arrived: dict[tuple[int, int], np.ndarray] = {}
        for gradient in (*dweights, dbiases):
            gradient.fill(0)
        for forward, chunk, m, is_first, is_last, tag in actions:
            weight = weights[chunk]
            if forward:
                x = batch[m]
                if not is_first:
                    x = activations[chunk, m]
                    comm.Recv(x, peer, tag)
                arrived[chunk, m] = x
                y = x @ weight.T
                y += biases[chunk]
                if is_last:
                    difference = y - batch[m]
                    np.vdot(difference, difference) / difference.size
                    difference *= 2 / difference.size / MICROBATCHES
                    loss_gradients[m] = difference
                else:
                    sends.append((comm.Isend(y, peer, tag + MICROBATCHES), y))
            else:
                if is_last:
                    dy = loss_gradients.pop(m)
                else:
                    dy = gradients[chunk, m]
                    comm.Recv(dy, peer, tag + shift)
                x = arrived.pop((chunk, m))
                dweights[chunk] += dy.T @ x
                dbiases[chunk] += dy.sum(0)
                if not is_first:
                    dx = dy @ weight
                    sends.append((comm.Isend(dx, peer, tag - MICROBATCHES + shift), dx))
        for request, _ in sends:
            request.Wait()

    return step


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
    host = Transport(comm)
    for size in SIZES:
        count = max(2, min(200, (1 << 23) // size))
        turns = [_through_mailbox(comm, host, size, count), _bare(comm, size, count)]
        took, bare = np.array(compare(comm, turns, repeats)) / (2 * count)
        report(
            comm,
            f"transport {size:>9} B",
            f"{_rate(size, took)}, bare {_rate(size, bare)}, difference "
            f"{1e6 * (took - bare):6.2f} us",
            bare / took,
            "bandwidth; at least 0.95 from 1 MiB on, at most 6 us more at 8 B",
        )
    host.close()


def _rate(size: int, seconds: float) -> str:
    return f"{seconds * 1e6:9.2f} us {size / seconds / 1e9:6.2f} GB/s"


def _through_mailbox(comm: Communicator, transport: Transport, size: int, count: int) -> Call:
    """Return `count` turns of an array from rank 0 to rank 1 and back, through a mailbox."""
    rank = comm.rank
    mailbox = Mailbox(transport)
    array = np.ones(size // 8)
    envelopes = [Envelope(1 - rank, 1, m, 0, (0, 0), (0, 1)) for m in range(count)]
    specs = [[(array.shape, array.dtype)]] * count
    schedule = mailbox.receive_schedule(envelopes, specs)

    def turns() -> None:
        mailbox.begin_call(schedule, 1)
        for envelope in envelopes:
            if rank == 0:
                mailbox.put(envelope, [array])
            mailbox.release([mailbox.take()])
            if rank == 1:
                mailbox.put(envelope, [array])
        mailbox.flush()

    return turns


def _bare(comm: MpiCommunicator, size: int, count: int) -> Call:
    """Return the same turns with bare mpi4py."""
    peer = 1 - comm.rank
    sent = np.ones(size // 8)
    received = [np.empty_like(sent), np.empty_like(sent)]

    def turns() -> None:
        for turn in range(count):
            arriving = comm.Irecv(received[turn % 2], peer, 1)
            if comm.rank == 0:
                leaving = comm.Isend(sent, peer, 1)
                arriving.Wait()
            else:
                arriving.Wait()
                leaving = comm.Isend(sent, peer, 1)
            leaving.Wait()

    return turns
