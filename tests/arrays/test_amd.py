"""AMD's GPUs, emulated: wavefronts of 64 lanes give the numbers of warps of 32, and bfloat16 is refused."""

import numpy as np
import pytest
from gpu_emulator.fixture import an_emulated_gpu
from support.device_attention import make, through_local
from support.kernel_training import trained

from mpipipe import arrays, attention, nn
from mpipipe.arrays import products
from mpipipe.errors import BackendError
from mpipipe.nn import kernels

KINDS = ("float64", "float16")


@pytest.fixture
def amd_gpu():
    with an_emulated_gpu(amd=True) as device:
        yield device


def on_both(compute):
    """What `compute()` returns with NVIDIA's device and with AMD's, downloaded."""
    found = []
    for amd in (False, True):
        with an_emulated_gpu(amd=amd) as device:
            assert arrays.is_amd() == amd
            found.append([arrays.download(x) for x in compute(device)])
    return found


def same_bits(compute):
    first, second = on_both(compute)
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]
    assert all(np.isfinite(x.astype(np.float64)).all() for x in first)


@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
@pytest.mark.parametrize("width", [12, 72])
def test_a_training_has_the_same_bits(monkeypatch, kind, width):
    """Rows of a part of a warp, and of two in a wavefront; in dropout a lane draws for others, too."""
    monkeypatch.setenv("MPIPIPE_ATTENTION", "cupy")
    same_bits(lambda _: trained(kind, "cuda", width))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1030, 5000])
def test_sums_over_long_rows_have_the_same_bits(kind, width):
    """Rows of a block, and of several turns of it."""

    def compute(_):
        stage = nn.Stage([nn.RMSNorm(width), nn.LayerNorm(width)], kind, device="cuda")
        x = np.random.default_rng(5).standard_normal((3, width)).astype(arrays.dtype(kind))
        y, saved = stage.forward(arrays.upload(x))
        value, dy = nn.softmax_cross_entropy(y, arrays.upload(np.array([3, 4, 1000])))
        return y, value, stage.backward(dy, saved), stage.gradients.flat

    same_bits(compute)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [dict(seq=11, heads=4, kv_heads=2), dict(seq=70, heads=3, kv_heads=3, dim=40)])
def test_attention_has_the_same_bits(kind, sizes, monkeypatch):
    monkeypatch.setenv("MPIPIPE_ATTENTION", "cupy")
    same_bits(lambda device: through_local(make(kind, **sizes), device)[0])


@pytest.mark.parametrize("source, target", [("float32", "bfloat16"), ("float64", "bfloat16"), ("float64", "float16")])
def test_numbers_are_rounded_once(source, target):
    """Around each tie of the narrow type, by less than float32 can show: two roundings would fall to the wrong side."""
    narrow = arrays.dtype(target)
    bits = np.random.default_rng(2).integers(0, 1 << 16, 4000).astype(np.uint16)
    step = 2.0 ** (-9 if target == "bfloat16" else -12)
    with np.errstate(invalid="ignore", over="ignore"):
        values = bits.view(narrow).astype(np.float64)
        values = np.concatenate([values[np.isfinite(values)], [0.0, -0.0, np.inf, np.nan]])
        near = np.concatenate([values * (1 + step * (1 + tilt)) for tilt in (0, 2.0**-30, -(2.0**-30), 0.3)])
        near = np.concatenate([near, [1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40]]).astype(source)

    def compute(_):
        rounded = arrays.empty(near.shape, narrow, "cuda")
        kernels.of("cuda").copy(arrays.upload(near), rounded)
        return (rounded,)

    (first,), (second,) = on_both(compute)
    assert first.tobytes() == second.tobytes()
    if source == "float64":
        up = {"bfloat16": (-2, 1 + 2.0**-7), "float16": (-1, 1 + 2.0**-10)}[target]
        assert float(second[up[0]]) == up[1]


# -- what is refused, and what is told


def test_a_stage_in_bfloat16_is_refused_with_the_reason(amd_gpu):
    with pytest.raises(BackendError, match="hipBLAS does not know") as refused:
        nn.Stage([nn.Linear(4, 4)], dtype="bfloat16", device="cuda")
    assert "float16" in str(refused.value)
    nn.Stage([nn.Linear(4, 4)], dtype="float16", device="cuda")
    nn.Stage([nn.Linear(4, 4)], dtype="bfloat16")


def test_products_of_bfloat16_are_refused_before_hipblas_ends_the_process(amd_gpu):
    x = arrays.upload(np.ones((2, 4, 4), arrays.dtype("bfloat16")))
    c = arrays.zeros((2, 4, 4), np.dtype(np.float32), "cuda")
    for call in (lambda: products.gemm(x[0], x[1], c[0]), lambda: products.batched_gemm(x, x, c)):
        with pytest.raises(BackendError, match="bfloat16"):
            call()


def test_products_tell_hipblas_the_type_of_their_sums_as_a_dtype(amd_gpu, monkeypatch):
    monkeypatch.setenv("CUPY_TF32", "1")
    library, told = arrays.cupy().cuda, []
    for name in ("gemmEx", "gemmStridedBatchedEx"):
        call = getattr(library.cublas, name)
        monkeypatch.setattr(library.cublas, name, lambda *args, call=call: (told.append(args[-2]), call(*args))[1])
    for kind in KINDS:
        x = arrays.upload(np.ones((2, 4, 4), arrays.dtype(kind)))
        c = arrays.zeros((2, 4, 4), arrays.accumulator(x.dtype), "cuda")
        products.gemm(x[0], x[1], c[0])
        products.batched_gemm(x, x, c, add=True)
        assert (arrays.download(c) == [[[8.0]], [[4.0]]]).all()
    single, double = library.runtime.CUDA_R_32F, library.runtime.CUDA_R_64F
    assert told == [double, double, single, single]


def test_a_gpu_is_called_by_its_architecture_and_attention_is_by_the_own_kernels(amd_gpu):
    assert arrays.describe_gpus() == ["cuda:0 Emulated AMD device, 16 GiB, AMD gfx90a"]
    assert "AMD's GPUs have no cuDNN" in attention.kernels.describe()
