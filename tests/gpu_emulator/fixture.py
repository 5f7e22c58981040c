"""What the fixture `gpu` gives to a test: a real GPU, or the emulated one with its counters."""

import os
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import pytest

from mpipipe import arrays

from . import emulated, host_compiler, install, uninstall

TESTS = Path(__file__).resolve().parents[1]


class Gpu:
    """The device under test.

    real : whether it is a GPU, or pretends to be one
    synchronisations : what the host waited for since the start or `reset`, such as "Event.synchronize"; always empty on
        a real GPU
    launches : names of the kernels, copies and GEMMs that were queued; always empty on a real GPU
    crossed : {"to_device": bytes, "to_host": bytes} that copies have taken between host and device, those of staged
        messages included; 0 on a real GPU
    machine : the emulated device, None on a real GPU and on one that pretends
    environment : variables for jobs of their own (fixture `launch`) that shall see the same device
    """

    def __init__(self, machine=None, pretends=False):
        self._emulated = machine
        self.machine = None if pretends else machine
        self.real = self.machine is None
        self.synchronisations = [] if self.real else machine.synchronisations
        self.launches = [] if self.real else machine.launches
        path = os.pathsep.join([str(TESTS / "gpu_emulator" / "site"), str(TESTS)])
        self.environment = {} if machine is None else {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), path])}

    def reset(self):
        """Forget the synchronisations and launches so far."""
        self.synchronisations.clear()
        self.launches.clear()

    @property
    def crossed(self) -> dict[str, int]:
        return {"to_device": 0, "to_host": 0} if self.real else dict(self.machine.crossed)

    def expected_error(self) -> list[str]:
        """What went wrong on the emulated device, which then counts as seen."""
        if self._emulated is None:
            return []
        errors = list(self._emulated.errors)
        self._emulated.errors.clear()
        return errors


@cache
def real_gpus() -> int:
    """Number of real GPUs that CuPy sees."""
    assert not emulated(), "the fixture gpu within an emulated GPU: take one of the two"
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError):
        return 0


def _stream():
    """The stream of a test: the null stream, or with MPIPIPE_TEST_GPU_STREAM=own the one that trainings have."""
    own = os.environ.get("MPIPIPE_TEST_GPU_STREAM", "") == "own"
    return arrays.own_stream() if own else nullcontext()


@contextmanager
def a_gpu(devices: int = 1):
    """A Gpu: a real one where there is one, else one of `devices` emulated ones."""
    wanted = os.environ.get("MPIPIPE_TEST_GPU")
    if wanted not in ("emulator", "amd", "pretend") and real_gpus():
        with _stream():
            yield Gpu()
        return
    with an_emulated_gpu(devices, wanted == "amd", wanted == "pretend") as device:
        yield device


@contextmanager
def own_gpus(rank: int, one_queue: bool = False):
    """An emulated Gpu for each rank, between which NCCL works.

    With `one_queue` all streams share one queue in hardware, the worst that a GPU may do to streams.
    """
    with an_emulated_gpu() as device:
        device.machine.first_bus = rank
        device.machine.one_queue = one_queue
        device.environment["MPIPIPE_TEST_GPU_OWN"] = "1"
        yield device


@contextmanager
def an_emulated_gpu(devices: int = 1, amd: bool = False, pretends: bool = False):
    """An emulated Gpu, or one of AMD's; it runs to its end, and fails the test where something went wrong unseen.

    One that pretends to be real has no counters, so that tests run what they run on a GPU.
    """
    if host_compiler() is None:
        pytest.skip("no GPU, and no g++ for the emulated one")
    machine = install(int(os.environ.get("MPIPIPE_TEST_GPU_SEED", "0")), devices, amd=amd)
    try:
        with _stream():
            yield Gpu(machine, pretends)
            machine.broken = False  # on purpose, by this test: the end of the stream is none of its business
    finally:
        errors = uninstall()
    if errors:
        pytest.fail("on the emulated device: " + "; ".join(errors), pytrace=False)
