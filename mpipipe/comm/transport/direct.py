"""Messages of device arrays that a GPU-aware MPI takes as they are."""

from __future__ import annotations

from mpipipe.arrays import Array
from mpipipe.comm.transport.device import DeferredMessage, DeviceTransport, Event, Name


class DirectTransport(DeviceTransport):
    """Messages whose addresses in device memory go to a GPU-aware MPI."""

    def _outgoing(self, array: Array, name: Name, ready: Event | None) -> DeferredMessage:
        return DeferredMessage(self, self.sends, name, array, ready, self.host.isend, self.host.senders)

    def _incoming(self, array: Array, name: Name, ready: Event | None) -> DeferredMessage:
        return DeferredMessage(self, self.receives, name, array, ready, self.host.irecv, self.host.receivers)
