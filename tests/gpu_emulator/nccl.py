"""cupy.cuda.nccl between emulated devices of several processes of one machine.

It does what NCCL does where that matters to whoever uses it:

- making a communicator, and the first sum of each kind, keep the host until the peers have come too;
- an operation is a kernel in the order of its stream. Once it has begun it holds the stream until all its ranks are
  there, which is for ever where one does not come, or comes with another size;
- two ranks on one GPU are refused;
- a communicator that is aborted lets its kernels end, with whatever is in memory then.

Data travel through files in shared memory.
"""

import atexit
import ctypes
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path

import ml_dtypes
import numpy as np

from .machine import DeviceHangError, HiddenAccess, machine
from .runtime import _integers, deviceGetPCIBusId, getDevice

NCCL_SUM = 0
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)

_TYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", ml_dtypes.bfloat16]
_ERRORS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}
_SHARED = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
_ID_BYTES = 128


class NcclError(RuntimeError):
    """What NCCL refuses."""

    def __init__(self, status: int):
        self.status = status
        super().__init__(_ERRORS[status])

    def __reduce__(self):
        return type(self), (self.status,)


def get_version() -> int:
    return 22707


def get_unique_id() -> bytes:
    folder = _SHARED / f"mpipipe-nccl-{uuid.uuid4().hex}"
    folder.mkdir()
    atexit.register(shutil.rmtree, folder, True)
    return str(folder).encode().ljust(_ID_BYTES, b"\0")


def _write(path: Path, content: bytes):
    """Make a file that appears with all its content."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_bytes(content)
    unfinished.rename(path)


class NcclCommunicator:
    """One rank of a communicator; the constructor keeps the host until all ranks have called it."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config=None):
        _integers(ndev=ndev, rank=rank)
        if type(commId) is not bytes or len(commId) != _ID_BYTES:
            raise ValueError(f"commId of {len(commId)} bytes")
        if config is not None:
            raise HiddenAccess("a configuration of NCCL is not emulated")
        self._home, self._size, self._rank, self._device = machine(), ndev, rank, getDevice()
        self._folder = Path(os.fsdecode(commId.rstrip(b"\0")))
        self._aborted = self._destroyed = False
        self._failure = 0  # what check_async_error finds: set by tests
        self._issued: dict[str, int] = {}
        self._met: set[str] = set()
        self._stream: int | None = None
        self._underway = 0
        self._bytes = 0  # that this rank has handed to its peers
        self._home.communicators.append(self)
        self._meet("join", range(ndev), deviceGetPCIBusId(self._device))
        buses = [self._path("join", other).read_text() for other in range(ndev)]
        if len(set(buses)) < ndev:
            raise NcclError(5)

    def _path(self, *names) -> Path:
        return self._folder / "-".join(map(str, names))

    def _meet(self, name: str, ranks, content: str = ""):
        """Keep the host until all these ranks have come to this point."""
        if name in self._met:
            return
        _write(self._path(name, self._rank), content.encode())
        start = time.monotonic()
        while not all(self._path(name, other).exists() for other in ranks):
            if self._aborted:
                raise NcclError(6)
            if time.monotonic() - start > self._home.patience:
                raise DeviceHangError(f"the host waits for ever inside NCCL, in {name}")
            time.sleep(1e-3)
        self._met.add(name)

    def _operation(self, name: str, stream: int, count: int, datatype: int) -> int:
        """Check what all operations have in common; returns the number of bytes."""
        if self._aborted or self._destroyed:
            raise NcclError(4)
        if self._stream not in (None, stream):
            raise HiddenAccess("one communicator on two streams: NCCL makes one of them wait for the other")
        self._stream = stream
        if not 0 <= datatype < len(_TYPES):
            raise NcclError(4)
        self._issued[name] = self._issued.get(name, -1) + 1
        return count * np.dtype(_TYPES[datatype]).itemsize

    def _launch(self, name: str, stream: int, run, meets):
        self._underway += 1

        def end():
            self._underway -= 1
            if not self._aborted:
                run()

        self._home.launch(self._home.queue_of(stream), name, end, lambda: self._aborted or meets())

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int):
        _integers(sendbuf=sendbuf, recvbuf=recvbuf, count=count, datatype=datatype, op=op, stream=stream)
        nbytes = self._operation("sum", stream, count, datatype)
        for pointer in (sendbuf, recvbuf):
            self._home.device_ranges.check(pointer, nbytes)
        if op != NCCL_SUM:
            raise HiddenAccess(f"a reduction by operation {op} is not emulated")
        self._meet(
            f"connect-sum-{datatype}-{nbytes.bit_length()}", range(self._size)
        )  # by algorithm, which sizes choose
        number = self._issued["sum"]
        name = f"sum-{number}-{datatype}-{count}"
        paths = [self._path(name, other) for other in range(self._size)]
        begun = []

        def meets() -> bool:
            if not begun:
                begun.append(True)
                self._bytes += nbytes
                _write(paths[self._rank], ctypes.string_at(sendbuf, nbytes))
            return all(path.exists() for path in paths)

        def run():
            kind = np.dtype(_TYPES[datatype])
            parts = [np.frombuffer(path.read_bytes(), kind) for path in paths]
            with np.errstate(all="ignore"):
                total = parts[0].copy()
                for part in parts[1:]:
                    total = (total + part).astype(kind)
            ctypes.memmove(recvbuf, total.tobytes(), nbytes)
            _write(self._path("summed", number, self._rank), b"")
            if all(self._path("summed", number, other).exists() for other in range(self._size)):
                for path in paths:
                    path.unlink(missing_ok=True)

        self._launch(f"ncclAllReduce {number} of {nbytes} bytes", stream, run, meets)

    def check_async_error(self):
        if self._aborted or self._destroyed:
            raise NcclError(4)
        if self._failure:
            raise NcclError(self._failure)

    def abort(self):
        self._aborted = True

    def destroy(self):
        if self._underway and not self._aborted:
            self._home.errors.append("an NCCL communicator was destroyed while its kernels were under way")
        if not self._destroyed and not self._aborted:
            _write(self._path("gone", self._rank), b"")
            if all(self._path("gone", other).exists() for other in range(self._size)):
                shutil.rmtree(self._folder, ignore_errors=True)
        self._destroyed = True


NcclCommunicator.__module__ = "cupy.cuda.nccl"
