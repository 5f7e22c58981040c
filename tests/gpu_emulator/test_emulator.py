"""The emulated GPU is as strict as it says: nothing looks inside, nothing runs early, nothing freed stays."""

import numpy as np
import pytest

import gpu_emulator as emulator
from gpu_emulator import HiddenAccess, now, poisoned
from mpipipe import arrays

HOST = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def device(emulated_gpu):
    """The emulated device."""
    return emulated_gpu.machine


# -- nothing looks inside


LOOKS = {
    "float": lambda x: float(x[0, 0]),
    "bool": lambda x: bool(x[0, 0]),
    "item": lambda x: x.item(),
    "asarray": np.asarray,
    "ufunc": np.exp,
    "function": np.sum,
    "host on the left": lambda x: HOST + x,
    "assignment": lambda x: x.__setitem__(..., 0),
    "addition": lambda x: x + x,
    "mask": lambda x: x[np.array([True, False, True])],
    "copying reshape": lambda x: x.T.reshape(-1),
    "dlpack": lambda x: np.from_dlpack(x),
    "CUDA array interface": lambda x: x.__cuda_array_interface__,
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_hidden_look_raises(device, look):
    with pytest.raises(HiddenAccess):
        LOOKS[look](arrays.upload(HOST))


# -- streams


def fill(array, value):
    """Queue a fill with bytes on the current stream."""
    arrays.cupy().cuda.runtime.memsetAsync(array.data.ptr, value, array.nbytes, arrays.stream().ptr)


def test_another_stream_sees_old_values_unless_it_waits(device):
    x, y, z = (arrays.empty((8,), np.uint8, "cuda") for _ in range(3))
    fill(x, 1)
    event = arrays.record()
    fill(x, 2)
    careless, careful = arrays.side_stream(), arrays.side_stream()
    with careless:
        arrays.copy_into(y, x)
    with careful:
        arrays.wait_for(event)
        arrays.copy_into(z, x)
    careless.synchronize()
    assert poisoned(y) and poisoned(x)
    careful.synchronize()
    assert (now(z) == 1).all()


# -- memory


def test_freed_memory_turns_to_nan_in_the_order_of_its_stream(device):
    x, y, z = (arrays.empty((8,), np.uint8, "cuda") for _ in range(3))
    fill(x, 1)
    arrays.copy_into(y, x)
    late = arrays.side_stream()
    ready = arrays.record()
    with late:
        arrays.wait_for(ready)
        arrays.copy_into(z, x)
    place = x.data.ptr
    del x
    arrays.stream().synchronize()
    assert (now(y) == 1).all()  # queued before the end of x
    late.synchronize()
    assert poisoned(z)  # nothing kept x for the other stream
    again = arrays.empty((8,), np.uint8, "cuda")
    assert again.data.ptr == place and poisoned(again)
    with late:
        assert arrays.empty((8,), np.uint8, "cuda").data.ptr != place


def test_freed_pinned_memory_changes_at_once(device):
    page = arrays.pinned(512)
    page[...] = 7
    x = arrays.empty((512,), np.uint8, "cuda")
    arrays.copy_to_device(x, page)
    where = page.ctypes.data
    del page
    arrays.stream().synchronize()
    assert poisoned(x)
    assert arrays.pinned(300).ctypes.data == where


def test_a_write_to_freed_memory_is_found():
    emulator.install()
    x = arrays.upload(HOST)
    arrays.stream().synchronize()
    late = x[0]._host
    del x
    arrays.stream().synchronize()
    late[...] = 1  # as MPI would that was given the address
    assert "after its end" in emulator.uninstall()[0]
