"""Launches that are packed once for each combination of shapes, strides, dtypes, alignments, options and GPUs."""

import numpy as np
import pytest
from gpu_emulator.fixture import an_emulated_gpu

from mpipipe import arrays, nn
from mpipipe.arrays import cuda
from mpipipe.arrays.cuda import Launch, Packed
from mpipipe.errors import ArgumentError


class Recorder:
    """Packs calls that write down what they are launched with."""

    def __init__(self):
        self.packings, self.launches = [], []

    def pack(self, *arguments):
        self.packings.append(arguments)
        return Launch(lambda *launch: self.launches.append(launch), (3,), (32,), ("numbers",))


@pytest.fixture
def recorder():
    return Recorder()


def device(shape, dtype="float32"):
    return arrays.zeros(shape, arrays.dtype(dtype), "cuda")


def test_each_gpu_has_its_own_calls(recorder):
    with an_emulated_gpu(devices=2):
        kernel = Packed(recorder.pack)
        for number in (0, 1, 0, 1):
            arrays.use_gpu(number)
            kernel((device((4,)),))
    assert len(recorder.packings) == 2


def test_what_packing_raises_is_raised_every_time(gpu):
    cuda, x, y = nn.kernels.of("cuda"), device((4, 8)), device((8, 4))
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"kernels\.add was given arrays that do not fit"):
            cuda.accumulate(x, y)
    cuda.accumulate(x, device((4, 8)))


def test_shapes_that_never_repeat_do_not_fill_the_memory(gpu, recorder, monkeypatch):
    monkeypatch.setattr(cuda, "MOST", 4)
    kernel = Packed(recorder.pack)
    for size in range(1, 20):
        kernel((device((size,)),))
        assert len(kernel._known) <= 4


def test_wide_words_are_for_addresses_that_allow_them(gpu):
    """The same shapes twice, first on a boundary of words and then beside one: the device faults if words stay wide."""
    cuda, values = nn.kernels.of("cuda"), np.arange(64, dtype=np.float32)
    room = arrays.upload(np.concatenate([values, values]))
    for start in (0, 1, 2, 0):
        x = room[start : start + 64]
        np.testing.assert_array_equal(arrays.download(cuda.add(x, x)), 2 * arrays.download(x))
