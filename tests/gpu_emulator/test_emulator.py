"""The emulated GPU is as strict as it says: nothing looks inside or runs early, and what is wrong in a kernel shows."""

from contextlib import contextmanager

import numpy as np
import pytest

import gpu_emulator as emulator
from gpu_emulator import CUDARuntimeError, HiddenAccess, now, poisoned
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


# -- kernels: barriers, types of arguments, and what is wrong in them


SOURCE = """
extern "C" __global__ void turn_around(const T* x, T* y, int barrier) {
    // y is x backwards, in each block
    __shared__ T row[64];
    row[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    if (barrier) __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = row[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void mixed(const T* x, double* y, long long n, float f, double d, const unsigned char* keep,
                                 void* any) {
    y[0] = n + f + d + (keep ? keep[0] : 0);
}

extern "C" __global__ void beside(T* y, int i) { y[i] = 1; }
extern "C" __global__ void beside_shared(T* y, int i) { __shared__ T a[4]; a[i] = 1; y[0] = a[0]; }
extern "C" __global__ void beside_dynamic(T* y, int i) { extern __shared__ T a[]; a[i] = 1; y[0] = a[0]; }
extern "C" __global__ void misaligned(T* y) { *(pack<T, 4>*)(y + 1) = pack<T, 4>(); }
extern "C" __global__ void lost_lane(T* y) {
    if (threadIdx.x < 31) y[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
    else __syncthreads();
}
"""


@pytest.fixture
def kernel(tmp_path):
    """kernel(name): a function of SOURCE for float32."""
    if emulator.host_compiler() is None:
        pytest.skip("no g++ for the emulated GPU")
    path = tmp_path / "source.cu"
    path.write_text(SOURCE)
    return lambda name: arrays.cuda_function(path, name, T=np.dtype(np.float32))


@contextmanager
def failing(machine, match):
    """What follows fails on the device, late."""
    with pytest.raises(CUDARuntimeError, match=match):
        yield
        arrays.stream().synchronize()
    machine.errors.clear()


def test_a_missing_barrier_shows(device, kernel):
    x = np.arange(64, dtype=np.float32)
    right = {True: 0, False: 0}
    for barrier in right:
        for _ in range(8):
            y = arrays.empty((64,), x.dtype, "cuda")
            kernel("turn_around")((1,), (64,), (arrays.upload(x), y, np.int32(barrier)))
            right[barrier] += np.array_equal(arrays.download(y), x[::-1])
    assert right[True] == 8 and right[False] < 8


def test_arguments_must_have_the_types_of_the_parameters(device, kernel):
    f = kernel("mixed")
    x, y = arrays.upload(HOST), arrays.empty((1,), np.float64, "cuda")
    keep = arrays.upload(np.array([True]))
    good = [x, y, np.int64(2), np.float32(0.5), np.float64(0.25), keep, x]
    f((1,), (1,), tuple(good))
    assert arrays.download(y) == 3.75
    f((1,), (1,), (*good[:5], None, None))
    assert arrays.download(y) == 2.75
    for n, bad in [(0, y), (0, HOST), (0, x.data.ptr), (1, x), (2, 2), (2, np.int32(2)), (3, 0.5), (3, np.float64(0.5)),
                   (4, np.float32(0.25)), (4, 0.25), (5, x)]:  # fmt: skip
        with pytest.raises(TypeError, match=f"argument {n} of mixed"):
            f((1,), (1,), (*good[:n], bad, *good[n + 1 :]))
    with pytest.raises(TypeError, match="7 arguments, not 6"):
        f((1,), (1,), tuple(good[:-1]))


ERRORS = {
    "beside_shared": ((4,), 0, "an index outside its array"),
    "beside_dynamic": ((4,), 16, "shared memory"),
    "misaligned": ((), 0, "multiple of 16"),
    "lost_lane": ((), 0, "lanes that never come"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_in_a_kernel_are_found(device, kernel, name):
    args, shared, match = ERRORS[name]
    y = arrays.empty((16,), np.float32, "cuda")
    with failing(device, match):
        kernel(name)((1,), (32,), (y, *map(np.int32, args)), shared_mem=shared)


def test_a_write_beside_an_allocation_is_found(device, kernel):
    for size, place in ((128, 130), (10, 10), (10, -1)):
        y = arrays.empty((size,), np.float32, "cuda")
        kernel("beside")((1,), (1,), (y, np.int32(place)))
        arrays.stream().synchronize()
        del y
        arrays.stream().synchronize()
        assert "beside an allocation" in device.errors.pop()
