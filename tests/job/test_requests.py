"""The owner of requests: memory that MPI may still touch outlives everybody who forgets it."""

import gc
import weakref

import numpy as np
from mpi4py import MPI

from mpipipe.job.requests import own

BYTES = 1 << 20  # by rendezvous: the receiver's memory is written when MPI advances, long after the call


def array(value=0):
    """An array that can be watched."""

    class Watched(np.ndarray):
        pass

    made = np.full(BYTES, value, np.uint8).view(Watched)
    return made, weakref.ref(made)


def arrives(comm, watch, value):
    """A message that nobody waits for any more still comes to its place."""
    while not (watch() == value).all():  # the limit is that of every test
        comm.Iprobe()  # any call of MPI lets messages advance


def test_a_buffer_outlives_a_receive_that_everybody_forgot(comm):
    box, watch = array()
    request = own(comm.Irecv(box, comm.rank, 5))
    del request, box
    gc.collect()
    assert watch() is not None, "the memory is free, and a message will be written to it"
    comm.Isend(np.full(BYTES, 7, np.uint8), comm.rank, 5).Wait()
    arrives(comm, watch, 7)


def test_a_complete_request_lets_go_of_its_buffer(comm):
    box, watch = array()
    request = own(comm.Irecv(box, comm.rank, 5))
    comm.Isend(np.ones(BYTES, np.uint8), comm.rank, 5).Wait()
    while not request.Test():
        pass
    request.Cancel()  # does nothing any more
    assert (box == 1).all()
    del box
    gc.collect()
    assert watch() is None
    del request


def test_a_receive_that_is_withdrawn_lets_go_of_its_buffer(comm):
    box, watch = array()
    request = own(comm.Irecv(box, comm.rank, 5))
    request.Cancel()
    assert request == MPI.REQUEST_NULL
    del box, request
    gc.collect()
    assert watch() is None


def test_memory_known_by_its_address_only_is_kept_too(comm):
    box, watch = array()
    view = MPI.buffer.fromaddress(box.ctypes.data, box.nbytes)
    request = own(comm.Irecv([view, MPI.BYTE], comm.rank, 5), box)
    del request, box, view
    gc.collect()
    assert watch() is not None
    comm.Isend(np.ones(BYTES, np.uint8), comm.rank, 5).Wait()
    arrives(comm, watch, 1)
