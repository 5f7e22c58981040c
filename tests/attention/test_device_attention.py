"""Attention against dense float64 attention in all dtypes: of device arrays, in rings too, and edge cases anywhere."""

from functools import partial

import numpy as np
import pytest
from support.device_attention import CASES, agrees, make, opposed, reference, through_local
from support.rings import refused
from support.rings import through_ring as through_host_ring

from mpipipe import arrays, attention
from mpipipe.attention.kernels import cupy
from mpipipe.attention.layout import KINDS, Layout
from mpipipe.comm.ring_exchange import RingExchange
from mpipipe.errors import ArgumentError, MismatchError

DTYPES = ["float64", "float32", "float16", "bfloat16"]
WAYS = [("", "float64"), ("", "float32"), ("cupy", "float16"), ("cupy", "bfloat16")]  # MPIPIPE_ATTENTION, dtype


@pytest.mark.parametrize("kernel, dtype", WAYS)
@pytest.mark.parametrize("options, sizes", CASES, ids=str)
def test_local_attention_equals_dense(gpu, monkeypatch, kernel, options, sizes, dtype):
    monkeypatch.setenv("MPIPIPE_ATTENTION", kernel)
    whole = make(dtype, **sizes)
    found, _ = through_local(whole, gpu, **options)
    agrees(found, reference(whole, **options), dtype)


@pytest.mark.parametrize("options, sizes", CASES[:7], ids=str)
def test_many_tiles(gpu, monkeypatch, options, sizes):
    """Tiles of few rows and columns that divide nothing: the running maximum, both bounds, and sums over tiles."""
    monkeypatch.setenv("MPIPIPE_ATTENTION", "cupy")
    monkeypatch.setattr(cupy, "TILE_BYTES", 1)
    monkeypatch.setattr(cupy, "ROWS", 5)
    whole = make("float16", **sizes)
    found, launched = through_local(whole, gpu, **options)
    assert gpu.real or launched.count("online_softmax") > 3
    agrees(found, reference(whole, **options), "float16")


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_rows_longer_than_a_warp_holds(gpu, monkeypatch, threads):
    """Tiles of several hundred columns: blocks of several warps."""
    monkeypatch.setenv("MPIPIPE_ATTENTION", "cupy")
    monkeypatch.setattr(cupy, "KEYS", 128 * threads)
    whole = make("float32", seq=6, keys=700, heads=2, kv_heads=1, batch=1)
    agrees(through_local(whole, gpu, causal=False)[0], reference(whole, causal=False), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beyond_ten_thousand_and_keys_opposed_to_queries(place, dtype):
    q, k, v, dout = make("float64", seq=40, size=40.0)
    q *= 25
    assert np.abs(np.einsum("bihd,bjhd->bhij", q[:, :, ::2], k)).max() > 1e4
    with np.errstate(all="raise", under="ignore"):
        if not arrays.is_half(arrays.dtype(dtype)):
            whole = [x.astype(dtype) for x in (q, k, v, dout)]
            agrees(through_local(whole, place=place)[0], reference(whole), dtype)
        whole = opposed(dtype, 20, 20)
        for causal in (True, False):
            expected = reference(whole, causal)
            assert expected[1].max() < -100
            agrees(through_local(whole, place=place, causal=causal)[0], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_arrays_without_keys(place, dtype):
    whole = make(dtype, seq=6, keys=0)
    out, lse, dq, _, _ = through_local(whole, place=place, causal=False)[0]
    assert not out.any() and not dq.any() and np.isneginf(lse).all()
    whole = make(dtype, seq=0, keys=6)
    found = through_local(whole, place=place)[0]
    assert found[0].size == 0 and not found[3].any() and not found[4].any()


def test_rows_whose_scores_all_overflow(gpu):
    """Products beyond the range of float32 are -inf: such rows are as rows that see nothing."""
    q, k, v, dout = make("float32", seq=6)
    k = -np.abs(k)
    q = np.abs(q)
    q[:, 2], k[:, :3] = 3e38, -3e38
    out, lse, *gradients = through_local([q, k, v, dout], gpu)[0]
    assert not out[:, 2].any() and np.isneginf(lse[:, :, 2]).all() and not gradients[0][:, 2].any()
    assert all(np.isfinite(x).all() for x in (out, *gradients[1:]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_stays_visible(place, monkeypatch, dtype):
    monkeypatch.setenv("MPIPIPE_ATTENTION", "cupy")
    whole = make(dtype, seq=6)
    whole[0][0, 3] = np.nan
    out, lse = (x.astype(np.float64) for x in through_local(whole, place=place)[0][:2])
    assert np.isnan(out[0, 3]).all() and np.isfinite(out[0, :3]).all() and np.isfinite(out[1]).all()
    assert np.isnan(lse[0, :, 3]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_with_any_strides_are_taken(place, dtype):
    fused, dout = (x.astype(arrays.dtype(dtype)) for x in np.random.default_rng(5).normal(size=(2, 2, 11, 8, 8)))
    there, gradient = place(fused), place(dout[:, :, :4].transpose(0, 2, 1, 3).copy()).transpose(0, 2, 1, 3)
    attend = attention.Local()
    for q, k, v in (
        (np.s_[:, :, :4], np.s_[:, :, 4:6], np.s_[:, :, 6:]),
        (np.s_[:, ::-1, :4], np.s_[:, :, :4], np.s_[:, ::-1, :4]),
    ):
        out, saved = attend.forward(there[q], there[k], there[v])
        found = arrays.download(out, saved.lse, *attend.backward(gradient, saved))
        agrees(found, reference([fused[q], fused[k], fused[v], dout[:, :, :4]]), dtype)


# -- rings


through_ring = partial(through_host_ring, place=arrays.upload)


@pytest.mark.parametrize("dtype, layout, direct", zip(DTYPES, [*KINDS, "zigzag"], "0110"))
def test_real_ranks(gpu, comm, monkeypatch, dtype, layout, direct):
    if gpu.real and direct == "1":
        pytest.skip("needs an MPI that takes device memory")
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", direct)
    whole = make(dtype, seq=22)
    agrees(through_ring(comm, whole, layout=layout)[0], reference(whole), dtype)


def test_a_step_is_on_the_stream_before_its_exchange_ends(gpu, comm, monkeypatch):
    """Attention is put on the stream while messages travel, and the host waits for messages alone."""
    if gpu.real or comm.size == 1:
        pytest.skip("needs the counters of the emulated device, and an exchange")
    ring = attention.Ring(comm, layout="zigzag", rotation="overlap")
    layout = Layout("zigzag", comm.size, 24)
    mine = [arrays.upload(layout.shard(x, comm.rank)) for x in make("float32", 24)]
    ring.forward(*mine[:3])
    began, ended, start, finish = [], [], RingExchange.start, RingExchange.finish

    def starting(*arguments):
        began.append(gpu.launches.count("online_softmax"))
        start(*arguments)

    def finishing(exchange):
        ended.append(gpu.launches.count("online_softmax"))
        finish(exchange)

    monkeypatch.setattr(RingExchange, "start", starting)
    monkeypatch.setattr(RingExchange, "finish", finishing)
    gpu.reset()
    ring.forward(*mine[:3])
    assert len(began) == comm.size - 1 and all(end > begin for begin, end in zip(began, ended))
    assert not gpu.synchronisations


@pytest.mark.mpi(min_size=2)
def test_ranks_with_arrays_on_different_devices(gpu, comm):
    odd = comm.rank == 1
    mine = make("float32", seq=4)
    arguments = mine[:3] if odd else [arrays.upload(x) for x in mine[:3]]
    ring = attention.Ring(comm, layout="contiguous")
    refused(comm, MismatchError, "differ in device", lambda: ring.forward(*arguments))
    on_device = [arrays.upload(x) for x in mine]
    saved = ring.forward(*on_device[:3])[1]
    dout = mine[3] if odd else on_device[3]
    refused(comm, ArgumentError, "does not fit the output", lambda: ring.backward(dout, saved))
    ring.backward(on_device[3], saved)


def test_arrays_that_are_refused(gpu):
    whole = make("float32", seq=4)[:3]
    there, local = [arrays.upload(x) for x in whole], attention.Local()
    for match, call in (
        ("different devices", lambda: local.forward(there[0], *whole[1:])),
        ("float16 or bfloat16", lambda: local.forward(*[arrays.upload(x.astype(np.int32)) for x in whole])),
        ("kept on the host", lambda: attention.KVCache(8).forward(*there)),
    ):
        with pytest.raises(ArgumentError, match=match):
            call()
