"""cuBLAS's products, and cuDNN's attention on the emulated GPU."""

from __future__ import annotations

import numpy as np
import pytest
from support.reference_attention import Dense, agrees
from support.tolerance import close

from gpu_emulator import CUDARuntimeError
from mpipipe import arrays

HOST = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def device(emulated_gpu):
    """The emulated device."""
    return emulated_gpu.machine


# -- products


def gemm(library, a, b, c, transa, transb, alpha, beta, compute, batch=False):
    """cuBLAS's C = alpha op(A) op(B) + beta C of column-major matrices, which are these arrays transposed."""
    types = {"float16": "16F", "bfloat16": "16BF", "float32": "32F", "float64": "64F"}
    code = [getattr(library.cuda.runtime, f"CUDA_R_{types[x.dtype.name]}") for x in (a, b, c)]
    cublas = library.cuda.cublas
    work = np.float64 if compute == "64F" else np.float32
    scalars = np.array([alpha, beta], work)
    *count, n, m = c.shape
    k = a.shape[-2] if not transa else a.shape[-1]
    ops = [cublas.CUBLAS_OP_T if turned else cublas.CUBLAS_OP_N for turned in (transa, transb)]
    ld = [x.strides[-2] // x.itemsize for x in (a, b, c)]
    step = [[x.strides[0] // x.itemsize] if batch else [] for x in (a, b, c)]
    call = cublas.gemmStridedBatchedEx if batch else cublas.gemmEx
    compute = getattr(cublas, f"CUBLAS_COMPUTE_{compute}")
    of_alpha, of_beta = scalars.ctypes.data, scalars.ctypes.data + scalars.itemsize
    call(library.cuda.device.get_cublas_handle(), *ops, m, n, k, of_alpha, a.data.ptr, code[0], ld[0], *step[0],
         b.data.ptr, code[1], ld[1], *step[1], of_beta, c.data.ptr, code[2], ld[2], *step[2], *count, compute,
         cublas.CUBLAS_GEMM_DEFAULT)  # fmt: skip
    scalars[...] = np.nan  # cuBLAS has read them


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("transb", [False, True])
@pytest.mark.parametrize("transa", [False, True])
@pytest.mark.parametrize(
    ("kind", "result", "compute"),
    [("float16", "float16", "32F"), ("float16", "float32", "32F"), ("bfloat16", "bfloat16", "32F"),
     ("bfloat16", "float32", "32F"), ("float32", "float32", "32F"), ("float64", "float64", "64F")],
)  # fmt: skip
def test_gemm(gpu, kind, result, compute, transa, transb, batch):
    m, n, k, count = 5, 7, 11, (3,) if batch else ()
    generator = np.random.default_rng(1)

    def parent(rows, columns, name):
        """Memory of a column-major (rows, columns) matrix, with 3 elements more in each column."""
        whole = generator.standard_normal((*count, columns, rows + 3)).astype(arrays.dtype(name))
        return whole, arrays.upload(whole)

    a, on_a = parent(*((k, m) if transa else (m, k)), kind)
    b, on_b = parent(*((n, k) if transb else (k, n)), kind)
    c, _ = parent(m, n, result)
    a, b, inner = a[..., :-3].swapaxes(-1, -2), b[..., :-3].swapaxes(-1, -2), c[..., :-3].swapaxes(-1, -2)
    left = a.swapaxes(-1, -2) if transa else a
    right = b.swapaxes(-1, -2) if transb else b
    exact = left.astype(np.float64) @ right.astype(np.float64)
    terms = np.abs(left.astype(np.float64)) @ np.abs(right.astype(np.float64))
    for alpha, beta in ((1.0, 0.0), (0.5, 1.0), (2.0, -0.25)):
        target = arrays.upload(c)
        views = (x[..., :-3] for x in (on_a, on_b, target))
        gemm(arrays.cupy(), *views, transa, transb, alpha, beta, compute, batch)
        found = arrays.download(target)
        expected = alpha * exact + beta * inner.astype(np.float64)
        size = abs(alpha) * terms + abs(beta) * np.abs(inner.astype(np.float64))
        work = np.float64 if compute == "64F" else np.float32
        close(found[..., :-3].swapaxes(-1, -2), expected, k + 2, size, dtype=work)
        np.testing.assert_array_equal(found[..., -3:].astype(np.float64), c[..., -3:].astype(np.float64))


def test_gemm_with_beta_zero_does_not_read_the_result(gpu):
    x, y = arrays.upload(np.eye(4, dtype=np.float32)), arrays.upload(np.full((4, 4), np.nan, np.float32))
    gemm(arrays.cupy(), x, x, y, False, False, 1, 0, "32F")
    np.testing.assert_array_equal(arrays.download(y), np.eye(4))


def test_gemm_refuses_what_cublas_refuses(device):
    x = {name: arrays.upload(np.zeros((4, 4), arrays.dtype(name))) for name in ("float16", "float32", "float64")}
    for *names, compute in (
        ("float16", "float32", "float32", "32F"),
        ("float32", "float32", "float16", "32F"),
        ("float32", "float32", "float32", "64F"),
        ("float64", "float64", "float64", "32F"),
    ):
        with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
            gemm(arrays.cupy(), *(x[name] for name in names), False, False, 1, 0, compute)
    cuda, ptr, one = arrays.cupy().cuda, x["float32"].data.ptr, HOST.ctypes.data
    handle = cuda.device.get_cublas_handle()

    def call(size, lda, a=ptr, handle=handle):
        cuda.cublas.gemmEx(handle, 0, 0, size, size, size, one, a, 0, lda, ptr, 0, 4, one, ptr, 0, 4, 68, -1)

    call(4, 4)
    with pytest.raises(CUDARuntimeError, match="invalid device pointer"):
        call(4, 5)
    with pytest.raises(RuntimeError, match="leading dimensions"):
        call(4, 3)
    with pytest.raises(RuntimeError, match="misaligned"):
        call(2, 4, ptr + 2)
    with pytest.raises(RuntimeError, match="handle"):
        call(4, 4, handle=handle + 1)
    with pytest.raises(TypeError):
        call(np.int64(4), 4)


# -- cuDNN


class Sdpa:
    """One call of cuDNN: arrays are (batch, seq, heads, dim) in memory."""

    def __init__(self, kind="float16", batch=2, sq=6, sk=9, heads=4, kv_heads=2, dim=8, seed=0):
        import cudnn

        self.cudnn, self.kind, self.scale = cudnn, arrays.dtype(kind), 0.3
        shapes = dict(q=(batch, sq, heads, dim), k=(batch, sk, kv_heads, dim), v=(batch, sk, kv_heads, dim),
                      dO=(batch, sq, heads, dim))  # fmt: skip
        generator = np.random.default_rng(seed)
        self.host = {name: generator.standard_normal(shape).astype(self.kind) for name, shape in shapes.items()}
        self.handle = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=arrays.stream().ptr)

    def graph(self, backward=False, results=(), **options):
        cudnn = self.cudnn
        names = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}
        io = getattr(cudnn.data_type, names[self.kind.name])
        g = cudnn.pygraph(io_data_type=io, intermediate_data_type=cudnn.data_type.FLOAT,
                          compute_data_type=cudnn.data_type.FLOAT, handle=self.handle, sm_version=90)  # fmt: skip
        uids = {name: uid for uid, name in enumerate(("q", "k", "v", "o", "dO", "stats", "dq", "dk", "dv"), 1)}

        def geometry(name):
            like = {"o": "q", "dq": "q", "dk": "k", "dv": "v"}.get(name, name)
            batch, seq, heads, dim = self.host[like].shape if name != "stats" else (*self.host["q"].shape[:3], 1)
            if name == "stats":
                return [batch, heads, seq, 1], [heads * seq, seq, 1, 1]
            return [batch, heads, seq, dim], [seq * heads * dim, dim, heads * dim, 1]

        def tensor(name, kind=io):
            dim, stride = geometry(name)
            return g.tensor(name=name, dim=dim, stride=stride, data_type=kind, uid=uids[name])

        def result(found, name, kind=io):
            dim, stride = geometry(name)
            found.set_uid(uids[name]).set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)

        given = {name: tensor(name) for name in "qkv"}
        if backward:
            given |= {name: tensor(name) for name in ("o", "dO")}
            given["stats"] = tensor("stats", cudnn.data_type.FLOAT)
            made = g.sdpa_backward(**given, attn_scale=self.scale, **options)
            for found, name in zip(made, ("dq", "dk", "dv")):
                result(found, name)
        else:
            o, stats = g.sdpa(**given, attn_scale=self.scale, generate_stats=True, **options)
            result(o, "o")
            result(stats, "stats", cudnn.data_type.FLOAT)
        g.validate()
        g.build_operation_graph()
        g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        g.check_support()
        g.build_plans()
        return g, uids

    def run(self, backward=False, given=None, **options):
        g, uids = self.graph(backward, **options)
        batch, sq, heads, _ = self.host["q"].shape
        names = ("q", "k", "v", "dO") if backward else ("q", "k", "v")
        device = {name: arrays.upload(self.host[name]) for name in names}
        outputs = {"o": self.host["q"].shape} if not backward else {"d" + name: self.host[name].shape for name in "qkv"}
        device |= {name: arrays.empty(shape, self.kind, "cuda") for name, shape in outputs.items()}
        device |= given or {"stats": arrays.empty((batch, heads, sq, 1), np.dtype(np.float32), "cuda")}
        space = arrays.empty((max(g.get_workspace_size(), 1),), np.dtype(np.uint8), "cuda")
        g.execute({uids[name]: x.data.ptr for name, x in device.items()}, space.data.ptr, handle=self.handle)
        return {name: device[name] for name in (*outputs, *([] if backward else ["stats"]))}


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("low", "high", "sq"), [(-99, 99, 6), (-99, 0, 6), (-2, 0, 9), (-3, 99, 5), (-99, 2, 6), (-99, 0, 12)]
)
def test_cudnn_computes_attention_and_its_gradients(device, kind, low, high, sq):
    call = Sdpa(kind, sq=sq)
    options = {} if abs(high) == 99 else {"diagonal_band_right_bound": high}
    options |= {} if low == -99 else {"diagonal_band_left_bound": 1 - low}
    forward = call.run(**options)
    away = np.arange(9) - np.arange(sq)[:, None]
    expected = Dense(*call.host.values(), (away >= low) & (away <= high), call.scale)
    backward = call.run(True, given=forward, **options)
    found = [forward["o"], forward["stats"][..., 0], *(backward[name] for name in ("dq", "dk", "dv"))]
    agrees([arrays.download(x) for x in found], expected)


def test_cudnn_refuses_what_it_does_not_do(device):
    refused = Sdpa().cudnn.cudnnGraphNotSupportedError
    for facts, options in [(dict(dim=12), {}), (dict(dim=264), {}), (dict(heads=3), {}), (dict(sq=1, sk=1), {}),
                           (dict(kind="float32"), {}), (dict(sq=10), dict(diagonal_band_left_bound=3))]:  # fmt: skip
        with pytest.raises(refused):
            Sdpa(**facts).graph(True, **options)
    Sdpa(sq=1, sk=1).graph()
    with pytest.raises(RuntimeError, match="Right bound"):
        Sdpa().graph(diagonal_band_right_bound=-1)
    call = Sdpa()
    g, _ = call.graph()
    x = arrays.upload(call.host["q"])
    with pytest.raises(RuntimeError, match="variant pack"):
        g.execute({1: x.data.ptr}, 0, handle=call.handle)
    with pytest.raises(CUDARuntimeError, match="addresses only"):
        g.execute({uid: x for uid in range(1, 7)}, 0, handle=call.handle)


def test_cudnn_gives_nan_for_rows_of_a_tiny_sum(device):
    call = Sdpa("bfloat16", sq=64, sk=64)
    call.scale = 40.0
    call.host["k"] = -np.abs(call.host["k"])
    call.host["q"] = np.abs(call.host["q"]) + np.asarray(2, call.kind)
    forward = call.run()
    assert (arrays.download(forward["stats"]) < -88.7).any()
    assert np.isnan(arrays.download(call.run(True, given=forward)["dq"]).astype(np.float32)).any()
    causal = dict(diagonal_band_right_bound=0)
    forward = call.run(**causal)
    assert not np.isnan(arrays.download(call.run(True, given=forward, **causal)["dq"]).astype(np.float32)).any()
