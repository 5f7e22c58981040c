"""Transport and mailbox: every dtype and shape arrives as it was sent, in any order and in pieces."""

import ml_dtypes
import numpy as np
import pytest
from support.around import check_every_shape, check_names, envelopes

from mpipipe.comm.mailbox import Mailbox
from mpipipe.comm.transport.host import Transport, check_sendable
from mpipipe.errors import ArgumentError
from mpipipe.pipeline.units import MessageSpec

NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
DTYPES = [*NAMES.split(), ml_dtypes.bfloat16]


class Short(Transport):
    piece_bytes = 4000


@pytest.mark.parametrize("kind", DTYPES, ids=str)
def test_every_dtype_and_shape_goes_round_the_ring(comm, kind):
    transport = Short(comm, 2, synchronous=True)
    check_every_shape(comm, transport, kind, np.asarray)
    transport.close()


def test_what_cannot_travel_is_refused():
    apart = np.asfortranarray(np.ones((2, 3))), np.ones(6)[::2]
    wrong = [*((array, "not C-contiguous") for array in apart), (np.array([None]), "cannot be sent"), ([1.0], "not an")]
    for array, match in wrong:
        with pytest.raises(ArgumentError, match=match):
            check_sendable(array)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("window", [1, 3, 9])
def test_messages_sent_in_another_order_arrive_under_their_names(comm, window, synchronous):
    transport = Transport(comm, synchronous=synchronous)
    check_names(comm, transport, window, 20_000, lambda value, count: np.full(count, float(value)))
    transport.close()


def test_unknown_shapes_come_with_a_header(comm):
    transport = Transport(comm)
    mailbox = Mailbox(transport)
    outgoing, incoming = envelopes(comm, 2)
    tree = (np.full((2, 3), comm.rank), np.ones(5, np.float32))
    mailbox.put_header(outgoing[1], MessageSpec.of(tree).encode())
    mailbox.put(outgoing[1], list(tree))
    wire = MessageSpec.decode(mailbox.take_header(incoming[1]))
    first, second = (slot.view for slot in mailbox.take_unknown(incoming[1], wire.leaves))
    assert wire == MessageSpec.of(tree) and first[0, 0] == (comm.rank - 1) % comm.size and second.sum() == 5
    mailbox.flush()
    with pytest.raises(ArgumentError, match="too many arrays"):
        mailbox.put_header(outgoing[0], b"x" * 5000)
    transport.close()
