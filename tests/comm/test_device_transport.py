"""Messages of device arrays, directly and staged: right data whatever the order in which events and messages end."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from support.around import check_every_shape, check_names, envelopes, finish, go_round, make, neighbours

from mpipipe import arrays
from mpipipe.comm import allreduce
from mpipipe.comm.mailbox import Mailbox
from mpipipe.comm.ring_exchange import RingExchange
from mpipipe.comm.transport import gpu_aware, staged
from mpipipe.comm.transport.device import DeviceTransport
from mpipipe.comm.transport.gpu_aware import GpuAwareness, make_transport
from mpipipe.comm.transport.host import Transport
from mpipipe.comm.transport.staged import StagedTransport
from mpipipe.errors import ArgumentError, PeerError
from mpipipe.job import context
from mpipipe.job.group import RankGroup
from mpipipe.job.wait import wait_for

KINDS = ["float32", "float64", "float16", ml_dtypes.bfloat16, "int64", "uint8", "bool"]


def check_mpi_takes(gpu, comm):
    """Skip where device memory is real and MPI would crash on it."""
    if gpu.real and not gpu_aware.detect(comm).direct:
        pytest.skip("this MPI does not take device memory")


@pytest.fixture(params=[DeviceTransport, StagedTransport], ids=["direct", "staged"])
def kind_of_transport(request, gpu, comm):
    if request.param is DeviceTransport:
        check_mpi_takes(gpu, comm)
    return request.param


def settle(transport):
    """Let the copies to the device end that are under way."""
    while isinstance(transport, StagedTransport) and transport.in_pool.returning:
        transport.in_pool.collect()


# -- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_dtype_and_shape_goes_round_the_ring(gpu, comm, kind_of_transport, kind):
    transport = kind_of_transport(comm, 2, synchronous=True)
    check_every_shape(comm, transport, kind)
    for operation in (transport.isend, transport.irecv):
        with pytest.raises(ArgumentError, match="not C-contiguous"):
            operation(arrays.upload(np.ones((4, 6))).T, comm.rank, 0, 1)
    transport.close()


def test_the_host_waits_for_nothing(gpu, comm, kind_of_transport):
    transport = kind_of_transport(comm)
    received = transport.empty((1 << 19,), np.dtype(float))
    gpu.reset()
    for turn in range(3):
        go_round(comm, transport, make(turn, 1 << 19), received, 0, 1)
    assert gpu.synchronisations == []
    transport.close()


# -- order ------------------------------------------------------------------------------------------------------------


def test_messages_of_one_name_keep_their_order_whichever_event_is_done_first(gpu, comm, kind_of_transport):
    """Producers and consumers on several streams, host arrays in between, sizes from 8 bytes to several chunks."""

    class Chunks(kind_of_transport):
        piece_bytes = 4096

    transport = Chunks(comm, synchronous=True)
    right, left = neighbours(comm)
    counts = [1, 3000, 2, 0, 700, 1500, 1, 512, 513, 40]
    streams = [arrays.side_stream() for _ in range(3)]
    sends, receives, received = [], [], []
    for number, count in enumerate(counts):
        on_host = number % 4 == 2
        with streams[number % 3]:
            target = np.empty(count) if on_host else transport.empty((count,), np.dtype(float))
            receives.append(transport.irecv(target, left, 0, 1))
            received.append(target)
    for number, count in enumerate(counts):
        value = np.arange(count) + 1e6 * comm.rank + 1e5 * number
        with streams[(2 * number + comm.rank) % 3]:
            for _ in range(number % 3):
                make(0)  # some streams have more to do
            sends.append(transport.isend(value if number % 3 == 1 else arrays.upload(value), right, 0, 1))
    for number in (5, 9, 2, 0, 8, 1, 7, 3, 6, 4):
        finish(sends[number], receives[number])
        found = arrays.download(received[number])
        assert found.size == counts[number] and (found == np.arange(found.size) + 1e6 * left + 1e5 * number).all()
    transport.close()


@pytest.mark.long
@pytest.mark.parametrize("window, count", [(1, 10), (3, 300_000), (9, 300_000)])
def test_messages_sent_in_another_order_arrive_under_their_names(gpu, comm, kind_of_transport, window, count):
    transport = kind_of_transport(comm, synchronous=True)
    check_names(comm, transport, window, count, make)
    transport.close()


def test_no_message_waits_for_pinned_memory_that_another_holds(gpu, comm, monkeypatch):
    """Long messages, sent synchronously in the order 0, 1, ..., and received one by one in the opposite order."""
    monkeypatch.setattr(staged, "RING", 1)

    class Chunks(StagedTransport):
        piece_bytes = 4096

    transport = Chunks(comm, synchronous=True)
    right, left = neighbours(comm)
    sends = [transport.isend(make(m, 2600), right, 0, m) for m in range(12)]
    received = transport.empty((2600,), np.dtype(float))
    for m in reversed(range(12)):
        wait_for(transport.irecv(received, left, 0, m), f"message {m}")
        assert (arrays.download(received) == m).all()
    finish(*sends)
    settle(transport)
    for pool in (transport.out_pool, transport.in_pool):
        assert pool.used == 0
        assert sum(map(len, pool.free.values())) <= 13  # one for each message, and the ring
    transport.close()


# -- the two rules ----------------------------------------------------------------------------------------------------


def receive_again_while_the_consumer_is_late(comm, transport, turns=4):
    """What a consumer sees that is queued behind each message on a stream of its own, and runs only at the end."""
    right, left = neighbours(comm)
    with arrays.side_stream():
        slot, results = transport.empty((16,), np.dtype(float)), []
        for turn in range(turns):
            with arrays.side_stream():
                sending = transport.isend(make(turn), right, 0, 1)
            finish(transport.irecv(slot, left, 0, 1), sending)
            settle(transport)
            result = arrays.empty_like(slot)
            arrays.copy_into(result, slot)
            results.append(result)
        comm.Barrier()
        transport.close()
        return [found[0] for found in arrays.download(*results)]


def test_a_receive_waits_for_the_last_consumer_of_its_buffer(gpu, comm, kind_of_transport):
    assert receive_again_while_the_consumer_is_late(comm, kind_of_transport(comm)) == [0, 1, 2, 3]


def send_at_once(comm, transport, count=16):
    """What arrives of an array whose producer is queued just before the send, into a receive that waits already."""
    right, left = neighbours(comm)
    received = transport.empty((count,), np.dtype(float))
    arriving = transport.irecv(received, left, 0, 1)
    while arriving.line.waiting:
        transport.progress()
    comm.Barrier()
    leaving = transport.isend(make(7, count), right, 0, 1)
    finish(leaving, arriving)
    transport.close()
    return set(arrays.download(received).tolist())


@pytest.mark.parametrize("count", [16, 300_000])
def test_a_send_waits_for_its_producer(gpu, comm, kind_of_transport, count):
    assert send_at_once(comm, kind_of_transport(comm), count) == {7.0}


def test_an_array_may_be_forgotten_once_it_is_sent(gpu, comm, kind_of_transport):
    transport = kind_of_transport(comm)
    right, left = neighbours(comm)
    received = [transport.empty((50_000,), np.dtype(float)) for _ in range(3)]
    requests = [transport.irecv(target, left, 0, m) for m, target in enumerate(received)]
    for m in range(3):
        requests.append(transport.isend(make(m, 50_000), right, 0, m))  # dropped here, and its memory is asked for next
    finish(*requests)
    assert [set(found.tolist()) for found in arrays.download(*received)] == [{0.0}, {1.0}, {2.0}]
    kept = weakref.ref(received[0])
    del received, requests
    gc.collect()
    assert kept() is None, "what has arrived is its receiver's alone"
    transport.close()


# -- the choice of a transport, and waits ------------------------------------------------------------------------------


def test_the_transport_follows_device_and_verdict(gpu, comm, monkeypatch):
    for device, direct, expected in (
        ("cpu", True, Transport), ("cuda", True, DeviceTransport), ("cuda", False, StagedTransport)
    ):  # fmt: skip
        monkeypatch.setattr(gpu_aware, "detect", lambda *groups, direct=direct: GpuAwareness(direct, "a test"))
        transport = make_transport(comm, 1, False, device)
        assert type(transport) is expected
        transport.close()


def test_any_wait_drives_what_is_held_back(gpu, comm, kind_of_transport):
    """A rank waits for an answer to a message that its device has not even made; it never looks at that send."""
    if comm.size < 2:
        pytest.skip("needs a peer")
    transport, peer = kind_of_transport(comm), comm.rank ^ 1
    if comm.rank % 2 == 0 and peer < comm.size:
        answer = np.zeros(1)
        sending = transport.isend(make(3, 300_000), peer, 0, 1)
        wait_for(comm.Irecv(answer, peer, 2))
        assert answer[0] == 3
        finish(sending)
    elif comm.rank % 2:
        received = transport.empty((300_000,), np.dtype(float))
        wait_for(transport.irecv(received, peer, 0, 1))
        comm.Send(arrays.download(received)[-1:], peer, 2)
    transport.close()


def test_a_note_of_failure_ends_a_wait_for_a_device_array(gpu, comm, kind_of_transport):
    group = RankGroup(comm)
    transport = kind_of_transport(comm)
    mailbox = Mailbox(transport, group)
    outgoing, incoming = envelopes(comm, 3)
    mailbox.begin_call(mailbox.receive_schedule(incoming, [[((300_000,), np.dtype(float))]] * 3), 2)
    mailbox.put(outgoing[2], [make(1, 300_000)])
    comm.Barrier()  # nobody hears of it while the transports are made
    if comm.rank == 0:
        group.fail(ValueError(), "rank 0 failed: no paint")
    else:
        with pytest.raises(PeerError, match="no paint"):
            mailbox.take()
    mailbox.cancel()
    assert transport not in context.current_rank().advancing
    comm.Barrier()


# -- rings and sums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("override", ["0", "1"], ids=["staged", "direct"])
@pytest.mark.parametrize("mode", ["overlap", "sendrecv"])
def test_blocks_go_round_a_ring(gpu, comm, monkeypatch, override, mode):
    if override == "1":
        check_mpi_takes(gpu, comm)
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", override)
    rotation = RingExchange(comm, synchronous=True, device="cuda")
    right, left = neighbours(comm)
    held, seen = make(comm.rank, 400_000), []
    buffers = [arrays.empty_like(held), arrays.empty_like(held)]
    for step in range(comm.size + 2):
        incoming = buffers[step % 2]
        rotation.start(mode, held, right, incoming, left)
        result = arrays.empty_like(held)
        arrays.copy_into(result, held)
        with arrays.side_stream():
            rotation.poll()  # elsewhere than where the data are used
        rotation.finish()
        seen.append(result)
        held = incoming
    found = [set(block.tolist()) for block in arrays.download(*seen)]
    assert found == [{float((comm.rank - step) % comm.size)} for step in range(comm.size + 2)]
    rotation.close()


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", ml_dtypes.bfloat16], ids=str)
def test_sums_of_device_buffers_equal_those_of_host_buffers(gpu, comm, monkeypatch, kind):
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 4000)
    values = [
        np.random.default_rng(5 * k + comm.rank).standard_normal(n).astype(kind)
        for k, n in enumerate((3001, 1, 501, 0, 9000))
    ]
    expected = [value.copy() for value in values]
    for flat in expected:
        wait_for(allreduce.AllReduce(comm, flat))
    flats = [value.copy() if k == 2 else arrays.copy(arrays.upload(value)) for k, value in enumerate(values)]
    gpu.reset()
    pending = [allreduce.AllReduce(comm, flat) for flat in flats]
    queue = pending[0].queue
    for k in np.random.default_rng(comm.rank).permutation(len(flats)):  # each rank looks at them in its own order
        wait_for(pending[k])
    buffers = [*queue.pool.returning, *(buffer for free in queue.pool.free.values() for buffer in free)]
    # one more, where the first bucket of those that wait finds all on their way back
    assert gpu.synchronisations == [] and 1 <= len(buffers) <= allreduce.BUFFERS + 1
    assert queue not in context.current_rank().advancing
    for flat, sum_ in zip(flats, expected):
        np.testing.assert_array_equal(arrays.download(flat), sum_)


def test_a_sum_under_way_advances_in_any_wait_and_can_be_given_up(gpu, comm):
    if comm.size < 2:
        pytest.skip("needs a peer")
    flat = make(comm.rank, 1000)
    pending = allreduce.AllReduce(comm, flat)
    mine, theirs = np.zeros(1), np.zeros(1)
    right, left = neighbours(comm)
    if comm.rank == 0:
        wait_for(pending)
    request = comm.Isend(mine, right, 3)
    wait_for(comm.Irecv(theirs, left, 3))  # rank 1 gets here only if rank 0 got its sum
    wait_for(pending)
    request.Wait()
    assert (arrays.download(flat) == comm.size * (comm.size - 1) / 2).all()
    spare = comm.Dup()  # and is not freed, as after a failure
    given_up = allreduce.AllReduce(spare, make(1, 1000))
    given_up.Cancel()
    assert given_up.queue not in context.current_rank().advancing


def test_a_large_sum_follows_small_ones_on_one_communicator(gpu, comm, monkeypatch):
    """Their buffers, which are kept, are too small for it."""
    monkeypatch.setattr(allreduce, "BUCKET_BYTES", 64_000)
    for count in (3, 700, 20_000, 3):
        flats = [make(comm.rank + k, count) for k in range(allreduce.BUFFERS)]
        pending = [allreduce.AllReduce(comm, flat) for flat in flats]
        for k, (flat, sum_) in enumerate(zip(flats, pending)):
            wait_for(sum_)
            found = arrays.download(flat)
            assert found.size == count and (found == comm.size * ((comm.size - 1) / 2 + k)).all()


# -- what is kept, and for how long -----------------------------------------------------------------------------------


def test_closing_waits_for_copies_out_of_pinned_memory(gpu, comm):
    """Its buffers are freed after that, and given to whoever asks next."""
    transport = StagedTransport(comm)
    transport.in_pool.collect = lambda: None  # to look whether copies are done makes the emulated device work on them
    with arrays.side_stream():
        received = [transport.empty((16,), np.dtype(float)) for _ in range(3)]
        for target in received:
            go_round(comm, transport, make(7), target, 0, 1)
        transport.close()
        del transport
        gc.collect()
        assert all((found == 7).all() for found in arrays.download(*received))
