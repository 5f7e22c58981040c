"""What the emulated cuBLAS and cuDNN refuse; that they compute is seen in tests of arrays and of attention."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from gpu_emulator import CUDARuntimeError
from mpipipe import arrays
from mpipipe.attention.kernels import cudnn_graph
from mpipipe.attention.kernels.cudnn_graph import GraphRequest

F16, F32, F64 = 2, 0, 1  # CUDA's numbers of dtypes


@pytest.fixture
def device(emulated_gpu):
    """The emulated device."""
    return emulated_gpu.machine


def test_cublas_refuses_dtypes_pointers_and_sizes(device):
    cuda, x = arrays.cupy().cuda, arrays.upload(np.zeros((4, 4), np.float64))
    ptr = x.data.ptr
    numbers = np.array([1.0, 0.0], np.float32)
    handle, one = cuda.device.get_cublas_handle(), numbers.ctypes.data

    def product(size, lda=4, a=ptr, handle=handle, kinds=(F32, F32, F32), compute="32F"):
        first, second, result = kinds
        how = getattr(cuda.cublas, f"CUBLAS_COMPUTE_{compute}")
        cuda.cublas.gemmEx(handle, 0, 0, size, size, size, one, a, first, lda, ptr, second, 4, one, ptr, result, 4, how,
                           cuda.cublas.CUBLAS_GEMM_DEFAULT)  # fmt: skip

    product(4)
    for *kinds, compute in (
        (F16, F32, F32, "32F"),
        (F32, F32, F16, "32F"),
        (F32, F32, F32, "64F"),
        (F64,) * 3 + ("32F",),
    ):
        with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
            product(4, kinds=kinds, compute=compute)
    with pytest.raises(CUDARuntimeError, match="invalid device pointer"):
        product(4, 50)
    for match, arguments in (
        ("leading dimensions", (4, 3)),
        ("misaligned", (2, 4, ptr + 2)),
        ("handle", (4, 4, ptr, 1)),
    ):
        with pytest.raises(RuntimeError, match=match):
            product(*arguments)
    with pytest.raises(TypeError):
        product(np.int64(4))


def graph(direction="forward", sq=6, sk=9, heads=4, kv_heads=2, dim=8, low=None, high=None):
    """A graph of cuDNN, built as far as a plan."""
    q, k, rows = (2, heads, sq, dim), (2, kv_heads, sk, dim), (2, heads, sq, 1)
    dims = dict(q=q, k=k, v=k, out=q, lse=rows)
    if direction == "backward":
        dims |= dict(dout=q, dq=q, dk=k, dv=k)
    shapes = tuple((name, x, (x[1] * x[2] * x[3], x[2] * x[3], x[3], 1)) for name, x in dims.items())
    cudnn, request = sys.modules["cudnn"], GraphRequest(direction, "float16", shapes, 0.3, low, high)
    made = cudnn_graph.build(cudnn, request, cudnn_graph.handle(), sm_version=90)
    made.build_operation_graph()
    made.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    made.check_support()
    made.build_plans()
    return made


def test_cudnn_refuses_what_it_does_not_do(device):
    refused = sys.modules["cudnn"].cudnnGraphNotSupportedError
    for facts in (dict(dim=12), dict(dim=264), dict(heads=3), dict(sq=1, sk=1), dict(sq=10, low=-2)):
        with pytest.raises(refused):
            graph("backward", **facts)
    graph(sq=1, sk=1)
    with pytest.raises(RuntimeError, match="Right bound"):
        graph(high=-1)
    made, x = graph(), arrays.zeros((64,), "float16", "cuda")
    with pytest.raises(RuntimeError, match="variant pack"):
        made.execute({1: x.data.ptr}, 0, handle=cudnn_graph.handle())
    with pytest.raises(CUDARuntimeError, match="addresses only"):
        made.execute({uid: x for uid in range(1, 7)}, 0, handle=cudnn_graph.handle())
