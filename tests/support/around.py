"""Messages around the ring of all ranks: each sends to its right neighbour, and receives from its left one."""

import numpy as np

from mpipipe import arrays
from mpipipe.comm.mailbox import Envelope, Mailbox
from mpipipe.job.wait import wait_for

SHAPES = [(), (0,), (1,), (3,), (3, 333), (2, 0, 4), (2, 1, 3, 1, 2, 1, 1, 2), (1,) * 12, (100_003,)]


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def content(shape, kind, seed):
    return np.random.default_rng(seed).integers(0, 2 if kind == "bool" else 100, size=shape).astype(kind)


def make(value, count=16):
    """A new device array, filled by work that is queued on the current stream."""
    array = arrays.empty((count,), np.dtype(float), "cuda")
    arrays.copy_into(array, arrays.upload(np.full(count, float(value))))
    return array


def finish(*requests):
    for request in requests:
        wait_for(request)


def go_round(comm, transport, sent, received, *name):
    """Send `sent` to the right, receive into `received` from the left, and wait for both."""
    right, left = neighbours(comm)
    finish(transport.irecv(received, left, *name), transport.isend(sent, right, *name))


def check_every_shape(comm, transport, kind, place=arrays.upload):
    """Arrays of all shapes, on the device or where `place` brings them, arrive as they were sent."""
    for number, shape in enumerate(SHAPES):
        received = transport.empty(shape, np.dtype(kind))
        go_round(comm, transport, place(content(shape, kind, 10 * number + comm.rank)), received, 1, 5)
        expected = content(shape, kind, 10 * number + neighbours(comm)[1])
        np.testing.assert_array_equal(arrays.download(received), expected)


def envelopes(comm, count):
    """Messages 0 ... count - 1 to the right neighbour, and from the left one."""
    return [[Envelope(peer, 1, m, 0, (0, 2 * m), (0, 2 * m + 1)) for m in range(count)] for peer in neighbours(comm)]


def check_names(comm, transport, window, count, make):
    """Messages sent in another order arrive under their names, in buffers that are used again."""
    mailbox, leaf = Mailbox(transport), ((count,), np.dtype(float))
    outgoing, incoming = envelopes(comm, 6)
    for turn in range(3):
        mailbox.begin_call(mailbox.receive_schedule(incoming, [[leaf]] * 6), window)
        for m in (3, 0, 5, 1, 2, 4):
            mailbox.put(outgoing[m], [make(100 * comm.rank + 10 * turn + m, count)])
            mailbox.poll()
        results = []
        for _ in range(6):
            slot = mailbox.take()
            results.append(arrays.copy(slot.view))
            mailbox.release([slot])
        mailbox.flush()
        for m, result in enumerate(arrays.download(*results)):
            assert (result == 100 * neighbours(comm)[1] + 10 * turn + m).all()
    assert len(mailbox.slots[leaf]) <= window + 1, "buffers are used again"
    mailbox.slots.clear()
