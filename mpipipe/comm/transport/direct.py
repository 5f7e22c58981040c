"""Messages of device arrays that a GPU-aware MPI takes as they are."""

from __future__ import annotations

from mpipipe.comm.transport.device import DeferredMessage, DeviceTransport


class DirectTransport(DeviceTransport):
    """Messages whose addresses in device memory go to a GPU-aware MPI."""

    def _outgoing(self, array, name, ready):
        return DeferredMessage(self, self.sends, name, array, ready, self.host.isend, self.host.senders)

    def _incoming(self, array, name, ready):
        return DeferredMessage(self, self.receives, name, array, ready, self.host.irecv, self.host.receivers)
