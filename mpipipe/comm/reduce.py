"""Sums over replicas: non-blocking, in buckets of a flat buffer, half types added in float32."""

from __future__ import annotations

import numpy as np

from mpipipe.comm import runtime

BUCKET_BYTES = 32 << 20


class PendingSum:
    """An all-reduce under way; `Test()` is true once `flat` holds the sum over all ranks of `comm`.

    Every rank must start the sums on one communicator in the same order. Float16 and bfloat16 have no MPI type and
    too few bits to add in: they are converted to float32 and rounded once, at the end.
    """

    def __init__(self, comm, flat):
        self.flat = flat
        self.work = flat if flat.dtype.itemsize >= 4 else flat.astype(np.float32)
        count = max(1, BUCKET_BYTES // self.work.itemsize)
        marker = runtime.in_place(comm)
        self.requests = [
            comm.Iallreduce(marker, self.work[start : start + count]) for start in range(0, self.work.size, count)
        ]

    def Test(self) -> bool:
        while self.requests and self.requests[-1].Test():
            self.requests.pop()
        if self.requests:
            return False
        if self.work is not self.flat:
            self.flat[...] = self.work
            self.work = self.flat
        return True
