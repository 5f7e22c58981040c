"""Ring attention against dense float64 attention: any length, layout, mask and ring; and the memory that it takes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_attention import NAMES, agrees, dense
from support.rings import arrays, masks, refused, through_ring
from support.tolerance import within

from mpipipe import attention
from mpipipe.arrays import dtype
from mpipipe.attention.layout import KINDS
from mpipipe.attention.ring_plan import make_plan
from mpipipe.errors import ArgumentError, MismatchError
from mpipipe.job import inprocess
from mpipipe.processor import thread_count


@st.composite
def cases(draw):
    seq = draw(st.integers(1, 70))
    options, expected, keys = draw(masks(seq))
    heads, kv_heads = draw(st.sampled_from([(8, 8), (8, 4), (8, 2), (8, 1), (3, 3)]))
    dim, value_dim = draw(st.sampled_from([(8, 8), (8, 5), (4, 12)]))
    sizes = dict(keys=keys, batch=draw(st.integers(1, 2)), heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim)
    whole = arrays(seq, **sizes, size=draw(st.sampled_from([1.0, 30.0])))  # scores of thousands
    options |= dict(layout=draw(st.sampled_from(KINDS)), rotation=draw(st.sampled_from(["overlap", "sendrecv"])))
    return whole, options, expected


@settings(max_examples=60)
@given(st.integers(1, 8), cases(), st.booleans())
def test_any_ring_equals_dense_attention(ranks, case, synchronous):
    whole, options, expected = case
    found = inprocess.run(ranks, lambda comm: through_ring(comm, whole, **options)[0], synchronous=synchronous)
    agrees(found[0], dense(*whole, *expected))


MASKS = [
    dict(causal=True), dict(causal=False), dict(causal=True, window=37),
    dict(causal=True, segments=[20, 1, 40]), dict(causal=False, segments=[33, 28]),
]  # fmt: skip


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_real_ranks_equal_dense_attention(comm, monkeypatch, layout, mask):
    monkeypatch.setenv("MPIPIPE_SYNC_SENDS", "1")
    whole = arrays(61)
    found, _ = through_ring(comm, whole, layout=layout, **mask)
    lengths = mask.get("segments")
    documents = None if lengths is None else [0, *np.cumsum(lengths)]
    agrees(found, dense(*whole, mask["causal"], mask.get("window"), documents))


@pytest.mark.parametrize("layout, seq", [("zigzag", 1), ("striped", 3), ("contiguous", 1000), ("zigzag", 1000)])
def test_lengths_on_real_ranks(comm, layout, seq):
    whole = arrays(seq, batch=1, heads=2, kv_heads=1)
    agrees(through_ring(comm, whole, layout=layout)[0], dense(*whole))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_does_not_suffer_from_the_ring(comm, kind):
    """Sums over blocks are float32, so results are those of one rank but for the last bits before the one rounding."""
    whole = [x.astype(dtype(kind)) for x in arrays(120)]
    found, _ = through_ring(comm, whole)
    assert [x.dtype.name for x in found] == [kind, "float32", kind, kind, kind]
    expected = dense(*whole)
    agrees(found, expected)
    rounding = lambda x: x.astype(whole[0].dtype).astype(float) - x  # noqa: E731
    for at in (0, 4):  # 1.02: float32 rounds 2^13 times finer than float16, a hundred times on the way
        error = found[at].astype(float) - expected[at]
        assert np.sqrt((error**2).mean()) <= 1.02 * np.sqrt((rounding(expected[at]) ** 2).mean())


def test_without_keys_everything_is_zero(comm):
    q, k, v, dout = arrays(12, keys=0)
    (out, lse, dq, _, _), _ = through_ring(comm, [q, k, v, dout], causal=False)
    assert not out.any() and not dq.any() and np.isneginf(lse).all()


def test_rotations_have_the_same_bits_and_so_do_two_runs(comm):
    whole = arrays(500, dtype=np.float32)
    runs = [through_ring(comm, whole, rotation=mode)[0] for mode in ("overlap", "sendrecv", "overlap")]
    for one, other, again in zip(*runs):
        assert one.tobytes() == other.tobytes() == again.tobytes()


def test_two_disjoint_rings_and_the_functions(comm):
    half = comm.Split(comm.rank % 2, comm.rank)
    whole = arrays(50 + comm.rank % 2, seed=comm.rank % 2)
    layout = attention.Layout("striped", half.size, whole[0].shape[1])
    for _ in range(2):
        mine = [layout.shard(array, half.rank) for array in whole]
        out, saved = attention.ring_attention(*mine[:3], half, layout="striped")
        gradients = attention.ring_attention_backward(mine[3], saved)
    expected = dense(*whole)
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients)))
    for name, wanted, allowed in zip(NAMES, expected, expected.bounds(np.float64)):
        if name in found:
            within(found[name], layout.shard(wanted, half.rank), layout.shard(allowed, half.rank), name)
    half.Free()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree(comm):
    q, k, v, _ = arrays(4)
    odd = comm.rank == 1
    layout = "contiguous"

    def call(*mine, **options):
        attention.Ring(comm, layout=layout, **options).forward(*mine)

    wide = arrays(4, heads=8)[0]
    refused(comm, MismatchError, "differ in heads", lambda: call(wide if odd else q, k, v))
    narrow = [x.astype(np.float32) for x in (q, k, v)]
    refused(comm, MismatchError, "differ in dtype", lambda: call(*(narrow if odd else (q, k, v))))
    refused(comm, MismatchError, "differ in window", lambda: call(q, k, v, window=2 if odd else 3))
    refused(comm, ArgumentError, "do not fit", lambda: call(q, k[:, :3] if odd else k, v))
    refused(comm, ArgumentError, "do not cover", lambda: call(q[:, :1] if not odd else q, k, v))
    refused(comm, ArgumentError, "do not cover", lambda: call(q, k, v, seq_len=5))
    refused(comm, ArgumentError, "segments do not cover", lambda: call(q, k, v, segments=[1, 1]))
    through = lambda **options: attention.ring_attention(q, k, v, comm, **options)  # noqa: E731
    refused(comm, ArgumentError, "unknown layout", lambda: through(layout="z" if odd else "zigzag"))
    refused(comm, MismatchError, "differ in causal", lambda: through(causal=odd))
    refused(comm, ArgumentError, "float16 or bfloat16", lambda: call(q.astype(np.complex64) if odd else q, k, v))
    call(q, k, v)
    attention.ring_attention(q, k, v, comm, window=np.int64(2) if odd else 2)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_do_different_things(comm):
    q, k, v, dout = arrays(4)
    odd = comm.rank == 1
    ring = attention.Ring(comm, layout="contiguous")
    one, two = ring.forward(q, k, v)[1], ring.forward(q, k, v)[1]
    refused(comm, MismatchError, "different calls", lambda: ring.backward(dout, two if odd else one))
    short = dout[:, :2] if odd else dout
    refused(comm, ArgumentError, "does not fit the output", lambda: ring.backward(short, one))
    again = [ring.backward(dout, one) for _ in range(2)]
    for first, second in zip(*again):
        assert first.tobytes() == second.tobytes()
    call = (lambda: ring.forward(q, k, v)) if odd else (lambda: ring.backward(dout, one))
    refused(comm, MismatchError, r"backward \(call 1\)" if not odd else "different calls", call)


def test_many_rings_share_one_communicator_and_few_plans(comm):
    """Documents packed anew for every batch: nothing piles up."""
    q, k, v, _ = arrays(2, batch=1, heads=1, kv_heads=1, dim=2)
    layout = attention.Layout("contiguous", comm.size, 2 * comm.size)
    mine = [layout.shard(np.repeat(x, comm.size, 1), comm.rank) for x in (q, k, v)]
    for number in range(100):
        segments = [2 + number] * (2 * comm.size)
        attention.ring_attention(*mine, comm, layout="contiguous", segments=segments)
    assert make_plan.cache_info().currsize <= 64


def test_wrong_options(comm):
    wrong = {"layout": "spiral", "rotation": "sideways", "window": 0}
    for name, value in wrong.items():
        with pytest.raises(ArgumentError, match=name):
            attention.Ring(comm, **{name: value})
    with pytest.raises(ArgumentError, match="needs a causal mask"):
        attention.Ring(comm, window=3, causal=False)


# -- memory grows with the local length, not with its square and not with the length of the sequence


def peaks(comm, local, rotation):
    """Peak bytes of the forward and of the backward above the arrays handed in, on the rank with the most."""
    rng = np.random.default_rng(comm.rank)
    q, k, v, dout = (rng.standard_normal((1, local, 2, 64), dtype=np.float32) for _ in range(4))
    ring = attention.Ring(comm, layout="zigzag", rotation=rotation)
    ring.forward(q[:, :8], k[:, :8], v[:, :8])  # what is made once
    tracemalloc.start()
    try:
        _, saved = ring.forward(q, k, v)
        forward = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        ring.backward(dout, saved)
        backward = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return np.max(comm.allgather((forward, backward)), axis=0)


@pytest.mark.long
@pytest.mark.parametrize("rotation", ["overlap", "sendrecv"])
def test_memory_is_linear_in_the_local_length(comm, rotation):
    """With the same bound for rings of any size: the sequence is as many times as long as there are ranks."""
    short, long = 2048, 4096
    small, large = peaks(comm, short, rotation), peaks(comm, long, rotation)
    growth = (large - small) / (long - short)  # bytes a position; the tiles' own memory drops out
    assert (large <= 2.1 * small).all()
    row = 4 * 2 * 64  # of q, k, v, ...: K, V held and arriving, the output, and a head's work; then gradients
    more = 3 * (thread_count() - 1)  # each thread works on a head of its own, one of two
    assert growth[0] <= (9 + more) * row and growth[1] <= (20 + more) * row


@pytest.mark.mpi(min_size=2)
def test_a_kernel_that_one_rank_does_not_know_leaves_none_waiting(comm, monkeypatch):
    if comm.rank == 1:
        monkeypatch.setenv("MPIPIPE_ATTENTION", "abacus")
    ring = attention.Ring(comm, layout="contiguous")
    with pytest.raises(ArgumentError, match=r"MPIPIPE_ATTENTION.*\n.*abacus.*\n.*cudnn or cupy"):
        ring.forward(*arrays(4)[:3])
