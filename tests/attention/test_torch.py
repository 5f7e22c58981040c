"""The kernel that PyTorch computes against the host kernel and dense attention, alone and in a ring; and its choice."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from support.reference_attention import agrees, dense
from support.rings import arrays, through_ring
from support.tolerance import close, largest

from mpipipe import attention
from mpipipe.attention import kernels
from mpipipe.attention.kernels import Gradients, KVBlock, OutLse, host
from mpipipe.attention.mask import Slice
from mpipipe.errors import ArgumentError, BackendError
from mpipipe.job import inprocess


@pytest.fixture
def torch_cpu(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv(kernels.VARIABLE, "torch")
    return kernels.chosen()


def both(kernel, q, k, v, dout, slices, scale=0.3, merge=False):
    """(out, lse, dq, dk, dv) of one block, behind another one where `merge`."""
    batch, seq, heads, _ = q.shape
    rng = np.random.default_rng(1)
    out, lse = np.zeros_like(dout), np.full((batch, heads, seq), -np.inf, q.dtype)
    if merge:
        out[...], lse[...] = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    block, result = KVBlock(q, k, v, scale, slices), OutLse(out, lse)
    kernel.forward(block, result, not merge and len(slices) == 1)
    gradients = Gradients(*(rng.normal(size=x.shape).astype(x.dtype) for x in (q, k, v)))
    kernel.backward(block, dout, result, gradients)
    return out, lse, *gradients


SLICES = [
    [Slice(0, 300, 0, 300, None, 0)],
    [Slice(0, 300, 0, 300, None, None)],
    [Slice(0, 300, 40, 300, None, 0)],  # more rows than keys
    [Slice(100, 300, 0, 300, None, 0)],
    [Slice(0, 300, 0, 300, -70, 0)],
    [Slice(0, 100, 3, 200, None, None), Slice(100, 300, 0, 300, None, 20), Slice(120, 290, 5, 60, None, 0)],
]


@pytest.mark.parametrize("slices", SLICES, ids=str)
@pytest.mark.parametrize(
    "heads, kv_heads, value_dim, copy_rows", [(3, 3, 8, 1024), (6, 2, 8, 1), (4, 1, 8, 1024), (6, 2, 5, 1024)]
)
def test_slices_equal_those_of_the_host_kernel(torch_cpu, monkeypatch, slices, heads, kv_heads, value_dim, copy_rows):
    monkeypatch.setattr(torch_cpu, "COPY_ROWS", copy_rows)
    q, k, v, dout = arrays(300, heads=heads, kv_heads=kv_heads, value_dim=value_dim)
    rows = sorted((part.q_start, part.q_stop) for part in slices)
    merge = rows != [(0, 300)]
    found, expected = (both(kernel, q, k, v, dout, slices, merge=merge) for kernel in (torch_cpu, host))
    score = 0.3 * 8 * largest(q) * largest(k)  # an error of it is a relative one of a weight
    for one, other in zip(found, expected):
        close(one, other, 300 + 8, (1 + 2 * score) * largest(other))


def test_it_is_called_for_all_that_it_can_do(torch_cpu, monkeypatch):
    """Full and causal slices never reach the host kernel; bands do."""
    calls = []
    monkeypatch.setattr(host, "forward", lambda block, *rest: calls.append(len(block.slices)))
    q, k, v, _ = arrays(60)
    attention.Local(causal=True).forward(q, k, v)
    attention.Local(causal=False).forward(q, k, v)
    assert not calls
    attention.Local(causal=True, window=10).forward(q, k, v)
    assert calls


def test_calls_of_one_key_head_or_several_give_the_same(torch_cpu, monkeypatch):
    q, k, v, dout = arrays(50, heads=6, kv_heads=3, dtype=np.float32)
    slices = [Slice(0, 50, 0, 50, None, 0)]
    together = both(torch_cpu, q, k, v, dout, slices)
    monkeypatch.setattr(torch_cpu, "PAIRS", 1)
    apart = both(torch_cpu, q, k, v, dout, slices)
    polls = []
    torch_cpu.forward(KVBlock(q, k, v, 0.3, slices, lambda: polls.append(1)), OutLse(*apart[:2]), True)
    assert len(polls) == 2 * 3
    for one, other in zip(together, apart):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("mask", [dict(causal=True), dict(causal=False), dict(causal=True, window=37)], ids=str)
def test_a_ring_equals_dense_attention(torch_cpu, ranks, layout, mask):
    whole = arrays(61, heads=4, kv_heads=2, dtype=np.float32 if ranks == 2 else np.float64)
    found = inprocess.run(ranks, lambda comm: through_ring(comm, whole, layout=layout, **mask)[0])
    agrees(found[0], dense(*whole, mask["causal"], mask.get("window")))


def test_arrays_that_pytorch_cannot_share(torch_cpu):
    """Read-only, and backwards: computed from a copy, without a warning."""
    q, k, v, dout = arrays(40)
    expected = dense(q, k[:, ::-1], v, dout)
    for array in (q, v, dout):
        array.flags.writeable = False
    attend = attention.Local()
    out, saved = attend.forward(q, k[:, ::-1], v)
    agrees((out, saved.lse, *attend.backward(dout, saved)), expected)


def test_the_host_kernel_is_the_default_and_an_unknown_one_is_refused(monkeypatch):
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    assert kernels.chosen() is host
    for value in ("", "host"):
        monkeypatch.setenv(kernels.VARIABLE, value)
        assert kernels.chosen() is host
    monkeypatch.setenv(kernels.VARIABLE, "abacus")
    with pytest.raises(ArgumentError, match=r"MPIPIPE_ATTENTION.*\n.*abacus.*\n.*host or torch"):
        attention.Local().forward(*arrays(4)[:3])


def test_a_missing_pytorch_is_an_error_with_its_remedy(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "torch")
    monkeypatch.delitem(sys.modules, kernels.MODULES["torch"][0], raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # what import says of a module that is not there
    with pytest.raises(BackendError, match="pip install torch"):
        attention.Local().forward(*arrays(4)[:3])


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_the_kernel_leaves_none_waiting(comm, monkeypatch):
    if comm.rank == 1:
        monkeypatch.setenv(kernels.VARIABLE, "abacus")
    ring = attention.Ring(comm, layout="contiguous")
    with pytest.raises(ArgumentError, match="abacus"):
        ring.forward(*arrays(4)[:3])
