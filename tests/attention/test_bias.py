"""A bias of the scores by positions: on one rank, in rings and by all-to-all, against dense attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gradcheck import check_stage
from support.reference_attention import agrees, dense
from support.rings import arrays, refused, through_ring

from mpipipe import arrays as backend
from mpipipe import attention, nn
from mpipipe.attention.kernels import host
from mpipipe.attention.layout import KINDS, Layout
from mpipipe.errors import ArgumentError, MismatchError
from mpipipe.job import inprocess

TABLE = np.random.default_rng(0).normal(size=(4, 40))


def relative(queries, keys):
    """Each head has a number for each distance, taken modulo 40."""
    return TABLE[:, (queries - keys) % 40]


def shared(queries, keys):
    """Integers, the same for all heads; no function of distances."""
    return (queries % 3) * (keys % 5)


def far(queries, keys):
    """Some keys are hidden, all keys from the queries at multiples of 4, and a row of keys has a number."""
    hidden = ((queries + keys) % 3 == 0) | (queries % 4 == 0)
    return np.where(hidden, -np.inf, np.cos(keys))


FUNCTIONS = [relative, shared, far, attention.alibi(4)]


def through(attend, mine):
    """(out, lse, dq, dk, dv)"""
    out, saved = attend.forward(*mine[:3])
    return out, saved.lse, *attend.backward(mine[3], saved)


@st.composite
def cases(draw):
    ranks, seq, causal = draw(st.integers(1, 5)), draw(st.integers(1, 70)), draw(st.booleans())
    keys = draw(st.none() | st.integers(1, 70))
    window = draw(st.none() | st.integers(1, 80)) if causal else None
    cuts = draw(st.none() | st.lists(st.integers(1, max(1, seq - 1)), max_size=3)) if keys is None else None
    documents = None if cuts is None else sorted({0, seq, *cuts})
    sizes = dict(keys=keys, kv_heads=draw(st.sampled_from([4, 2, 1])), value_dim=draw(st.sampled_from([8, 5])))
    return ranks, seq, draw(st.sampled_from(KINDS)), causal, window, documents, draw(st.sampled_from(FUNCTIONS)), sizes


@settings(max_examples=50)
@given(cases())
def test_any_ring_with_a_bias_equals_dense_attention(case):
    ranks, seq, layout, causal, window, documents, bias, sizes = case
    whole = arrays(seq, **sizes)
    segments = None if documents is None else np.searchsorted(documents, np.arange(seq), "right")
    options = dict(causal=causal, window=window, segments=segments, bias=bias)
    found = inprocess.run(ranks, lambda comm: through_ring(comm, whole, layout=layout, **options)[0])
    expected = dense(*whole, causal, window, documents, bias=bias)
    agrees(found[0], expected)
    agrees(through(attention.Local(**options), whole), expected)


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("options", [dict(causal=True), dict(causal=False), dict(window=37)], ids=str)
def test_real_ranks_equal_dense_attention(comm, layout, options):
    whole = arrays(61)
    for bias in FUNCTIONS:
        found, _ = through_ring(comm, whole, layout=layout, bias=bias, **options)
        expected = dense(*whole, options.get("causal", True), options.get("window"), bias=bias)
        agrees(found, expected)
        for one, other in zip(found, expected):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * max(1, np.abs(other[np.isfinite(other)]).max()))


@pytest.mark.parametrize("kv_heads, causal, window", [(4, True, None), (1, False, None), (2, True, 333)])
def test_a_bias_is_asked_for_once_for_each_tile_of_few_numbers(kv_heads, causal, window):
    calls = []

    def counted(queries, keys):
        calls.append((queries, keys))
        return relative(queries, keys)

    whole = arrays(700, kv_heads=kv_heads, batch=2)
    attend = attention.Local(causal, window=window, bias=counted)
    agrees(through(attend, whole), dense(*whole, causal, window, bias=relative))
    rows = host.ROWS * kv_heads // 4
    assert all(q.shape == (len(q), 1) and k.ndim == 1 and len(q) <= rows and len(k) <= host.KEYS for q, k in calls)
    pairs = [(q[0, 0], k[0]) for q, k in calls]
    assert len(pairs) == 2 * len(set(pairs))  # in the forward and in the backward, for all of the batch
    assert sum(len(q) * len(k) for q, k in calls) <= 2 * 700 * (700 if window is None else window + rows)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_have_positions_of_their_own_rows(kind):
    whole = arrays(23, batch=2)
    segments = np.array([[0] * 9 + [1] * 14, [4] * 23])

    def on_each_rank(comm, attend):
        layout = Layout(kind, comm.size, 23)
        object_ = attend(comm, layout)
        mine = [layout.shard(x, comm.rank) for x in whole]
        out, saved = object_.forward(*mine[:3], segments=segments)
        return [layout.unshard(parts) for parts in zip(*comm.allgather((out, *object_.backward(mine[3], saved))))]

    makers = {
        1: lambda comm, layout: attention.Local(bias=relative),
        2: lambda comm, layout: attention.Ring(comm, layout=layout, bias=relative),
        3: lambda comm, layout: attention.Ulysses(comm, layout=layout, bias=relative),
    }
    for ranks, maker in makers.items():
        found = inprocess.run(ranks, lambda comm, maker=maker: on_each_rank(comm, maker))[0]
        for row, documents in enumerate(([0, 9, 23], [0, 23])):
            one = slice(row, row + 1)
            expected = dense(*[x[one] for x in whole], documents=documents, bias=relative)
            agrees([found[0][one], expected[1], *(x[one] for x in found[1:])], expected)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_each_rank_of_ulysses_takes_the_bias_of_its_heads(kv_heads):
    whole = arrays(31, kv_heads=kv_heads)
    layout = Layout("zigzag", 3, 31)

    def on_each_rank(comm):
        attend = attention.Ulysses(comm, layout=layout, bias=relative).with_window(11)
        mine = [layout.shard(x, comm.rank) for x in whole]
        out, saved = attend.forward(*mine[:3])
        return out, *attend.backward(mine[3], saved)

    out, *gradients = map(layout.unshard, zip(*inprocess.run(3, on_each_rank)))
    expected = dense(*whole, window=11, bias=relative)
    agrees([out, expected[1], *gradients], expected)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_a_bias_in_lower_precision(kind):
    whole = arrays(40, dtype=backend.dtype(kind))
    agrees(through(attention.Local(bias=relative), whole), dense(*whole, bias=relative))


def test_with_a_window_the_bias_stays_and_layers_have_gradients():
    whole = arrays(19)
    agrees(through(attention.Local(bias=relative).with_window(5), whole), dense(*whole, window=5, bias=relative))
    layer = nn.SelfAttention(8, 4, 2, attention.Local(bias=relative), rope_base=None)
    check_stage(nn.Stage([layer], dtype="float64"), np.random.default_rng(0).standard_normal((2, 5, 8)))


# -- Press, Smith and Lewis -------------------------------------------------------------------------------------------


def paper_slopes(heads):
    """The rule of section 3: a geometric sequence from 2^(-8/n) with that ratio; between powers of 2, both of them."""
    power = 2 ** int(np.log2(heads))
    sequence = lambda n: [2 ** (-8 / n) * 2 ** (-8 / n * i) for i in range(n)]  # noqa: E731
    return sequence(power) + (paper_slopes(2 * power)[0::2][: heads - power] if power < heads else [])


@pytest.mark.parametrize("heads", range(1, 34))
def test_alibi_has_the_slopes_of_the_paper(heads):
    queries, keys = np.arange(7, 12)[:, None], np.arange(9)
    expected = -np.array(paper_slopes(heads))[:, None, None] * np.abs(queries - keys)
    np.testing.assert_allclose(attention.alibi(heads)(queries, keys), expected, rtol=1e-14)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_bias_that_does_not_fit_is_refused():
    whole = arrays(6)
    for wrong, match in (
        (lambda q, k: np.zeros((3, len(q), len(k))), r"float64\[3, 6, 6\]"),
        (lambda q, k: np.zeros((len(q), len(k), 1)), r"\(4, 6, 6\)"),
        (lambda q, k: np.zeros(len(k), complex), "complex"),
        (lambda q, k: None, "object"),
    ):
        with pytest.raises(ArgumentError, match=match):
            attention.Local(bias=wrong).forward(*whole[:3])
    for wrong in (3.0, np.zeros((6, 6))):
        with pytest.raises(ArgumentError, match="bias of attention"):
            attention.Local(bias=wrong)
    for heads in (0, -1, 2.0):
        with pytest.raises(ArgumentError, match="heads of alibi"):
            attention.alibi(heads)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_functions(comm):
    mine = arrays(3)[:3]
    odd = comm.rank == 1
    call = lambda bias: attention.Ring(comm, bias=bias).forward(*mine)  # noqa: E731
    refused(comm, MismatchError, "differ in bias", lambda: call(relative if odd else shared))
    refused(comm, ArgumentError, "bias of attention", lambda: call(2 if odd else shared))


def test_an_error_in_a_bias_on_one_rank_leaves_no_rank_waiting():
    def work(comm):
        def bias(queries, keys):
            if comm.rank == 1:
                raise ValueError("no such table")
            return 0.0

        ring = attention.Ring(comm, bias=bias)
        for _ in range(2):
            ring.forward(*arrays(3)[:3])

    with pytest.raises(ValueError, match="no such table"):
        inprocess.run(3, work)


def test_other_kernels_and_gpus_refuse_a_bias(comm, gpu, monkeypatch):
    mine = arrays(3)[:3]
    makers = (
        lambda: attention.Local(bias=shared),
        lambda: attention.Ring(comm, bias=shared),
        lambda: attention.Ulysses(comm, bias=shared),
    )
    for make in makers:
        with pytest.raises(ArgumentError, match=r"numpy kernel alone\n.*arrays of a GPU"):
            make().forward(*map(backend.upload, mine))
    monkeypatch.setenv("MPIPIPE_ATTENTION", "torch")
    for make in makers:
        with pytest.raises(ArgumentError, match="MPIPIPE_ATTENTION=torch"):
            make().forward(*mine)
