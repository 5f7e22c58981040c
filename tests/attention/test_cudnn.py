"""Attention by cuDNN: which work it gets, how it is asked, and what happens where it refuses."""

import sys
import warnings

import numpy as np
import pytest
from support.device_attention import CASES, agrees, make, opposed, reference, through_local
from support.reference_attention import Dense
from support.tolerance import bound, close, within

from mpipipe import arrays, attention
from mpipipe.attention import kernels, mask
from mpipipe.attention.kernels import Gradients, KVBlock, OutLse, cudnn, cudnn_graph, host
from mpipipe.attention.kernels import cupy as cupy_kernel
from mpipipe.attention.kernels.cudnn_graph import GraphRequest
from mpipipe.attention.kernels.interface import new_result
from mpipipe.errors import ArgumentError, BackendError

HALVES = ["float16", "bfloat16"]


@pytest.fixture
def library(gpu, monkeypatch):
    """The module cudnn; a refusal that is not expected is an error."""
    if not cudnn_graph.available().usable:
        assert gpu.real or arrays.is_amd(), cudnn_graph.available().reason
        pytest.skip(cudnn_graph.available().reason)
    monkeypatch.delenv("MPIPIPE_ATTENTION", raising=False)
    cudnn_graph._mine.plan.cache_clear()
    with warnings.catch_warnings():
        # on a GPU an engine may refuse the tiny sizes of these tests; those of models are tested at the end
        warnings.filterwarnings("ignore" if gpu.real else "error", message="cuDNN refuses")
        yield sys.modules["cudnn"]
    cudnn_graph._mine.plan.cache_clear()
    cudnn_graph._looked_up.cache_clear()  # a test may have changed the library


def only_emulated(gpu):
    if gpu.real:
        pytest.skip("needs the counters, or the changeable library, of the emulated device")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("options, sizes", [case for case in CASES if case[1].get("dim", 8) == 8], ids=str)
def test_all_masks_by_cudnn(gpu, library, options, sizes, dtype):
    """Local attention in half precision is cuDNN's, but for the band over fewer keys than queries and single pairs."""
    whole = make(dtype, **sizes)
    found, launched = through_local(whole, gpu, **options)
    agrees(found, reference(whole, **options), dtype)
    left_over = {"seq": 12, "keys": 7} == sizes or sizes == {"seq": 1} or "segments" in options
    assert gpu.real or ("online_softmax" in launched or "softmax_backward" in launched) <= left_over
    assert gpu.real or "sdpa" in launched or sizes == {"seq": 12, "keys": 7}
    assert gpu.real or "softmax_backward" in launched or sizes != {"seq": 1}


@pytest.mark.parametrize("low, high", [(None, None), (None, 0), (None, 4), (-3, 0), (-3, 2), (-5, None), (0, 0)])
@pytest.mark.parametrize("seq, keys", [(9, 14), (14, 9)])
@pytest.mark.parametrize("kernel", [cudnn, cupy_kernel], ids=["cudnn", "cupy"])
def test_any_band_of_a_slice(gpu, library, kernel, low, high, seq, keys):
    """A slice that leaves rows out: pointers and lengths, both bounds, and sums with what was there, or without."""
    whole = make("bfloat16", seq=20, keys=22)
    q, k, v, dout = (arrays.upload(x) for x in whole)
    part = mask.Slice(3, 3 + seq, 5, 5 + keys, low, high)
    cut = [x[:, 3 : 3 + seq] if n in (0, 3) else x[:, 5 : 5 + keys] for n, x in enumerate(whole)]
    expected = banded(*cut, low, high)
    result, block = new_result(q, v, np.dtype(np.float32), False), KVBlock(q, k, v, 0.5, [part])
    kernel.forward(block, result, False)
    found, found_lse = arrays.download(*result)
    bounds = expected.bounds("bfloat16")
    within(found[:, 3 : 3 + seq], expected[0], bounds[0], "out")
    within(found_lse[:, :, 3 : 3 + seq], expected[1], bounds[1], "lse")
    assert not found[:, :3].any() and not found[:, 3 + seq :].any()
    kernel.forward(block, result, False)  # the same keys again: the same output, twice the weight
    twice, twice_lse = arrays.download(*result)
    within(twice[:, 3 : 3 + seq], expected[0], bounds[0], "out of both")
    within(twice_lse[:, :, 3 : 3 + seq], expected[1] + np.log(2), bounds[1], "lse of both")
    rounded = arrays.upload(found.astype(whole[0].dtype))
    own = slice(3, 3 + seq), *[slice(5, 5 + keys)] * 2
    for before, overwrite in ((1, False), (np.nan, True)):
        sums = Gradients(*(arrays.upload(np.full(x.shape, before, np.float32)) for x in (q, k, v)))
        kernel.backward(block, dout, OutLse(rounded, arrays.upload(found_lse)), sums, overwrite)
        added = (x - (0 if overwrite else before) for x in arrays.download(*sums))
        for array, wanted, allowed, inner in zip(added, expected[2:], bounds[2:], own):
            within(array[:, inner], wanted, allowed + bound(np.float32, 2, 1 + np.abs(wanted)), "gradient")
            assert not np.delete(array, np.r_[inner], 1).any()


def banded(q, k, v, dout, low, high):
    """Dense attention of one slice in float64, scale 0.5."""
    apart = np.arange(k.shape[1])[None] - np.arange(q.shape[1])[:, None]
    seen = (apart >= (-np.inf if low is None else low)) & (apart <= (np.inf if high is None else high))
    return Dense(q, k, v, dout, seen, 0.5)


def test_views_of_one_array_are_not_copied(gpu, library):
    """Queries, keys and values side by side, as SelfAttention gives them; odd views are copied first."""
    only_emulated(gpu)
    fused, dout = make("float16", seq=16, heads=8)[0], make("float16", seq=16)[3]
    on_device, gradient = arrays.upload(fused), arrays.upload(dout)
    q, k, v = on_device[:, :, :4], on_device[:, :, 4:6], on_device[:, :, 6:]
    attend = attention.Local()
    _, saved = attend.forward(q, k, v)
    attend.backward(gradient, saved)
    gpu.reset()
    attend.backward(gradient, attend.forward(q, k, v)[1])
    assert gpu.launches == ["sdpa", "sdpa_backward"]
    gpu.reset()
    out, _ = attend.forward(q[:, ::-1], k, v)
    assert gpu.launches == ["strided_copy", "sdpa"]
    expected = reference([fused[:, ::-1, :4], fused[:, :, 4:6], fused[:, :, 6:], dout])
    within(arrays.download(out), expected[0], expected.bounds("float16")[0], "out")


def test_documents_of_a_block_are_merged_together(gpu, library):
    """One pass over the sum for all that lie one below the other, not one for each document."""
    only_emulated(gpu)
    whole = make("bfloat16", seq=24)
    q, k, v, _ = (arrays.upload(x) for x in whole)
    rows = [mask.PositionRange(0, 24, 0, 1)]
    slices = mask.mask_slices(rows, rows, True, None, range(0, 25, 3))
    result = new_result(q, v, np.dtype(np.float32), overwrite=False)
    gpu.reset()
    cudnn.forward(KVBlock(q, k, v, 8**-0.5, slices[::-1]), result, False)
    out, lse = arrays.download(*result)
    assert gpu.launches.count("sdpa") == 8 and gpu.launches.count("merge") == 1
    expected = reference(whole, segments=[3] * 8)
    for name, one, other, allowed in zip(("out", "lse"), (out, lse), expected, expected.bounds("bfloat16")):
        within(one, other, allowed, name)


@pytest.mark.parametrize("dim", [5, 8, 128])
@pytest.mark.parametrize("dtype", ["float64", "float32", *HALVES])
def test_partial_results_become_one(gpu, dtype, dim):
    """Of some rows each, a few at a time; log-sum-exps far apart, and a row that no block sees."""
    rng, kind, blocks = np.random.default_rng(dim), arrays.dtype(dtype), []
    q = arrays.empty((2, 6, 3, dim), kind, "cuda")
    outs, lses = np.zeros((5, 2, 6, 3, dim)), np.full((5, 2, 6, 3), -np.inf)
    for number, start in enumerate((0, 1, 2, 0, 1)):
        out = rng.normal(size=(2, 5 - start, 3, dim)).astype(kind)
        lse = (rng.normal(size=(2, 3, 5 - start)) * [[1], [30], [3000]]).astype(arrays.accumulator(kind))
        outs[number, :, start:5], lses[number, :, start:5] = out, lse.swapaxes(1, 2)
        blocks.append(cudnn.PendingRows(arrays.upload(out), arrays.upload(lse), np.int32(start), np.int32(5)))
    result = new_result(q, q, arrays.accumulator(kind), overwrite=False)
    for some in (blocks[: cudnn.BLOCKS], blocks[cudnn.BLOCKS :]):
        cudnn.merge(some, result)
    found, lse = arrays.download(*result)
    assert not found[:, 5].any() and np.isneginf(lse[:, :, 5]).all()
    top = lses.max(0)[:, :5]
    weights = np.exp(lses[:, :, :5] - top)
    close(lse[:, :, :5].swapaxes(1, 2), top + np.log(weights.sum(0)), 9, 30 + np.abs(top))
    parts = (weights / weights.sum(0))[..., None] * outs[:, :, :5]
    size = (30 + 2 * np.abs(top))[..., None] * np.abs(parts).sum(0)  # a log-sum-exp enters an exponential
    close(found[:, :5], parts.sum(0), 9, size, dtype=lse.dtype)


# -- plans


def test_attention_on_two_streams_runs_on_each(gpu, library):
    whole = make("bfloat16", seq=16)
    for stream in (arrays.stream(), arrays.side_stream()):
        with stream:
            agrees(through_local(whole)[0], reference(whole), "bfloat16")


# -- what cuDNN does not do


def test_which_kernel(gpu, library, monkeypatch):
    def chosen(dtype="bfloat16", **sizes):
        return kernels.chosen(*(arrays.upload(x) for x in make(dtype, seq=4, **sizes)[:3]))

    assert chosen() is cudnn and chosen("float16", dim=64, value_dim=128) is cudnn
    for case in (dict(dim=12), dict(dim=8, value_dim=4), dict(dim=264), dict(dim=136, value_dim=128)):
        assert chosen(**case) is cupy_kernel
    assert chosen("float32") is chosen("float64") is cupy_kernel
    monkeypatch.setenv("MPIPIPE_ATTENTION", "cupy")
    assert chosen() is cupy_kernel
    monkeypatch.setenv("MPIPIPE_ATTENTION", "cudnn")
    assert chosen() is cudnn
    assert kernels.chosen(*make("bfloat16", seq=4)[:3]) is host  # the choice is for device arrays
    for match, case in (("not in float32", dict(dtype="float32")), ("multiples of 8", dict(dim=12))):
        with pytest.raises(ArgumentError, match=match):
            chosen(**case)
    monkeypatch.setenv("MPIPIPE_ATTENTION", "flash")
    with pytest.raises(ArgumentError, match="names no attention kernel"):
        chosen()


REFUSED = [(90900, "9.9.0 is too old"), (91001, "too old"), (None, "cannot be loaded"), ("", "cannot be imported")]


@pytest.mark.parametrize("version, text", REFUSED)
def test_libraries_that_are_refused(gpu, library, monkeypatch, version, text):
    only_emulated(gpu)

    def backend_version():
        if version is None:
            raise RuntimeError("cannot dlopen")
        return version

    monkeypatch.setattr(library, "backend_version", backend_version)
    if version == "":
        monkeypatch.setitem(sys.modules, "cudnn", None)
    cudnn_graph._looked_up.cache_clear()
    whole = make("bfloat16", seq=6)
    verdict = cudnn_graph.available()
    assert not verdict.usable and text in verdict.reason and text in kernels.describe()
    agrees(through_local(whole)[0], reference(whole), "bfloat16")
    monkeypatch.setenv("MPIPIPE_ATTENTION", "cudnn")
    with pytest.raises(BackendError, match=text):
        through_local(whole)


def test_a_window_is_not_given_to_the_version_that_gets_it_wrong(gpu, library, monkeypatch):
    only_emulated(gpu)
    monkeypatch.setattr(library, "backend_version", lambda: 91400)
    cudnn_graph._looked_up.cache_clear()
    whole = make("bfloat16", seq=12)
    _, plain = through_local(whole, gpu)
    found, launched = through_local(whole, gpu, window=4)
    assert "sdpa" in plain and "sdpa" not in launched and "online_softmax" in launched
    agrees(found, reference(whole, window=4), "bfloat16")


def test_a_refused_graph_is_computed_by_cupy(gpu, library, monkeypatch):
    only_emulated(gpu)

    def refuse(graph):
        raise library.cudnnGraphNotSupportedError("No execution plans support the graph.")

    monkeypatch.setattr(library.pygraph, "check_support", refuse)
    whole = make("bfloat16", seq=12)
    with pytest.warns(UserWarning, match="cuDNN refuses") as warned:
        found, launched = through_local(whole, gpu)
    assert len(warned) == 2  # forward and backward
    agrees(found, reference(whole), "bfloat16")
    assert "sdpa" not in launched and "online_softmax" in launched
    through_local(whole, gpu)  # silent now, and asked no more
    assert cudnn_graph._mine.plan.cache_info().misses == 2


# -- known errors of the library


@pytest.mark.parametrize("seq, keys", [(192, 192), (130, 64), (64, 130), (20, 20), (1, 128), (128, 128)])
def test_no_nan_where_all_scores_are_very_negative(gpu, library, seq, keys):
    whole = opposed("bfloat16", seq, keys, heads=2, kv_heads=1, batch=1)
    found, launched = through_local(whole, gpu, causal=False)
    expected = reference(whole, causal=False)
    assert expected[1].max() < -100
    agrees(found, expected, "bfloat16")
    assert gpu.real or "sdpa_backward" in launched


# -- sizes of models


@pytest.mark.long
@pytest.mark.parametrize("seq, dim", [(128, 64), (1024, 64), (128, 128), (1024, 128)])
def test_sizes_of_models_are_done_by_cudnn(gpu, library, seq, dim):
    """No refusal here, on whatever device."""
    whole = make("bfloat16", batch=1, seq=seq, heads=2, kv_heads=1, dim=dim)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="cuDNN refuses")
        found, launched = through_local(whole, gpu)
    agrees(found, reference(whole), "bfloat16")
    assert gpu.real or [name for name in launched if "memcpy" not in name] == ["sdpa", "sdpa_backward"]


# -- the real library, without a GPU


def strides(dims, whole):
    """Strides, in cuDNN's order of axes, of the front of a (batch, seq, heads, dim) array of `whole` (rows, heads)."""
    rows, heads = whole
    return rows * heads * dims[3], dims[3], heads * dims[3], 1


def requests():
    """One request for each kind of graph that is ever asked for."""
    for direction in ("forward", "backward"):
        for seq, keys in ((256, 256), (61, 61), (4096, 8192), (8192, 4096), (1, 128)):
            for heads, kv_heads, dim, width in ((8, 8, 128, 128), (8, 2, 64, 64), (4, 1, 256, 256), (4, 2, 64, 128)):
                for low, high in ((None, None), (None, 0), (None, 5), (-8, 0), (-8, 5), (-8, None)):
                    if low is not None and seq > keys:
                        continue
                    q, k, v = (2, heads, seq, dim), (2, kv_heads, keys, dim), (2, kv_heads, keys, width)
                    out = 2, heads, seq, width
                    shapes = [(name, dims, strides(dims, (dims[2] + 7, heads + 2 * kv_heads)))
                              for name, dims in (("q", q), ("k", k), ("v", v))]  # fmt: skip
                    shapes.append(("out", out, strides(out, (seq, heads))))
                    shapes.append(("lse", (2, heads, seq, 1), (heads * seq, seq, 1, 1)))
                    if direction == "backward":
                        for name, dims in (("dout", out), ("dq", q), ("dk", k), ("dv", v)):
                            shapes.append((name, dims, strides(dims, (dims[2], dims[1]))))
                    padded = direction == "backward" and (keys % 128 != 0 or seq < 128)
                    yield GraphRequest(direction, "bfloat16", tuple(shapes), 0.125, low, high, padded)


@pytest.fixture
def real_library():
    """NVIDIA's package, where it is installed with its library; its checks need no GPU."""
    module = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    if not cudnn_graph.installed().usable:
        pytest.skip(cudnn_graph.installed().reason)
    return module


def dim_of(request):
    return next(dims[3] for name, dims, _ in request.shapes if name == "q")


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
def test_the_real_library_takes_every_graph(real_library, capability):
    """Each array, mask and option is named as it should be, and what is not asked of a GPU is what it refuses."""
    seen, refused = 0, []
    for request in requests():
        back = request.direction == "backward"
        limit, *beyond = cudnn_graph.widest_backward(capability) if back else (256,)
        if dim_of(request) <= limit or dim_of(request) in beyond:
            cudnn_graph.build(real_library, request, sm_version=capability)
            seen += 1
        else:
            refused.append(request)
    assert seen + len(refused) == 2 * 4 * (4 * 6 + 3) * 3 // 2 and {dim_of(request) for request in refused} <= {256}
    for request in refused:
        with pytest.raises(real_library.cudnnGraphNotSupportedError, match="hidden_dim"):
            cudnn_graph.build(real_library, request, sm_version=capability)


@pytest.mark.gpu
def test_the_real_library_refuses_what_is_wrong_and_takes_the_plans_of_the_trial(real_library):
    request = next(request for request in requests() if request.direction == "backward")
    shapes = tuple((name, (*dims[:2], 1, dims[3]), steps) for name, dims, steps in request.shapes)
    with pytest.raises(real_library.cudnnGraphNotSupportedError):
        cudnn_graph.build(real_library, request._replace(shapes=shapes), sm_version=90)
    with pytest.raises(real_library.cudnnGraphNotSupportedError):
        cudnn_graph.build(real_library, next(requests()), sm_version=75)
    for direction in cudnn_graph.ALONG:
        cudnn_graph.build(real_library, cudnn_graph.request(direction), sm_version=80)


# -- sizes that models have --------------------------------------------------------------------------------------------


def test_cudnn_computes_attention_on_a_real_gpu(gpu):
    described = kernels.describe()
    assert not gpu.real or described.startswith(("cudnn", "cupy because MPIPIPE_ATTENTION says so"))
