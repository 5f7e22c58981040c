"""The cost model: known figures, and bytes that a real ring counts."""

import numpy as np
import pytest
from support.rings import arrays
from support.tolerance import close

from mpipipe import attention
from mpipipe.arrays import dtype
from mpipipe.attention import cost
from mpipipe.attention.layout import Layout
from mpipipe.job import inprocess


def test_known_lengths_at_which_transfers_hide():
    """bfloat16, over NVLink, InfiniBand, and a copy through the host, to three digits."""
    for bandwidth, length in ((450e9, 2889), (50e9, 26_000), (10e9, 130_000)):
        assert cost.hiding_length_forward(650e12, bandwidth, itemsize=2) == pytest.approx(length, rel=1e-3)
    assert cost.hiding_length_forward(650e12, 450e9, group=8, itemsize=2) == pytest.approx(361, rel=1e-3)
    assert cost.hiding_length_forward(100e9, 4e9) == 100


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("group", [1, 4])
def test_at_that_length_a_step_takes_as_long_to_compute_as_to_send(causal, group):
    flops, bandwidth, kv_heads, dim = 3e11, 7e9, 2, 64
    part = 0.5 if causal else 1
    s = cost.hiding_length_forward(flops, bandwidth, group, 4, causal)
    computing = cost.attention_flops(part * s * s, group * kv_heads, dim) / flops
    close(computing, cost.kv_bytes(s, kv_heads, dim) / bandwidth, 16)
    s *= 2 / cost.BACKWARD_WORK
    computing = cost.BACKWARD_WORK * cost.attention_flops(part * s * s, group * kv_heads, dim) / flops
    close(computing, 2 * cost.kv_bytes(s, kv_heads, dim) / bandwidth, 16)


CASES = [
    dict(seq=3), dict(seq=200, window=70), dict(seq=40, keys=33, causal=False),
    dict(seq=61, kv_heads=1, dtype=np.float32), dict(seq=61, dtype=dtype("bfloat16"), dim=5, value_dim=3),
]  # fmt: skip


def counted_and_computed(comm, case, layout):
    """Bytes of the forward and of the backward, as the ring counts them and as the formulas say."""
    case = dict(case)
    options = {name: case.pop(name) for name in ("causal", "window") if name in case}
    whole = arrays(case.pop("seq"), **case)
    rows, keys = (Layout(layout, comm.size, whole[at].shape[1]) for at in (0, 1))
    mine = [part.shard(array, comm.rank) for part, array in zip((rows, keys, keys, rows), whole)]
    ring = attention.Ring(comm, layout=layout, **options)
    _, saved = ring.forward(*mine[:3])
    forward = ring.bytes_sent
    ring.backward(mine[3], saved)
    counted = forward, ring.bytes_sent - forward
    _, k, v, _ = whole
    sizes = k.shape[2], k.shape[3], v.shape[3], k.shape[0]
    blocks, gradients = (
        [cost.kv_bytes(keys.length(rank), *sizes, itemsize) for rank in range(comm.size)]
        for itemsize in (k.itemsize, max(4, k.itemsize))
    )
    other = None if keys.seq_len == rows.seq_len else keys
    steps = rows.steps(options.get("causal", True), options.get("window"), keys=other)
    return counted, (
        cost.sent_forward(blocks, comm.rank, steps), cost.sent_backward(blocks, comm.rank, steps, gradients)
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rings_of_any_size_send_what_the_formulas_say(case, layout):
    for ranks in (1, 2, 5):
        found = inprocess.run(ranks, lambda comm: counted_and_computed(comm, case, layout))
        for counted, computed in found:
            assert counted == computed
        assert (sum(counted[0] for counted, _ in found) > 0) == (ranks > 1)


# -- Time and bytes of the rings of several layers, against closed forms ----------------------------------------------


LAYERS, L = 24, 1024
SIZES = dict(heads=16, kv_heads=4, head_dim=64)


def costs(kind, ranks, bandwidth, flops=1e11, **options):
    return cost.ring_cost(Layout(kind, ranks, L * ranks), flops=flops, bandwidth=bandwidth, **SIZES, **options)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("itemsize, batch", [(4, 1), (2, 3)])
@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e12])
def test_without_a_mask_each_step_takes_the_longer_of_computation_and_message(ranks, itemsize, batch, bandwidth):
    forward, backward = costs(
        "contiguous", ranks, bandwidth, causal=False, layers=LAYERS, itemsize=itemsize, batch=batch
    )
    block = 2 * batch * L * 4 * 64 * itemsize  # K and V
    gradient = 2 * batch * L * 4 * 64 * 4
    compute = 4 * batch * L * L * 16 * 64 / 1e11
    more = ranks - 1
    assert forward.sent == LAYERS * more * block
    assert backward.sent == LAYERS * (max(0, ranks - 2) * block + more * gradient)
    close(forward.computing, LAYERS * ranks * compute, 32)
    close(forward.seconds, LAYERS * (more * max(compute, block / bandwidth) + compute), 64)
    # backward: K and V of the first step, both together, then gradients alone; of two ranks gradients in the last step
    messages = [block] * min(1, max(0, ranks - 2)) + [block + gradient] * max(0, ranks - 3) + [gradient] * min(2, more)
    messages = [0] * (ranks - len(messages)) + messages
    close(backward.computing, 2.5 * forward.computing, 32)
    close(backward.seconds, LAYERS * sum(max(2.5 * compute, size / bandwidth) for size in messages), 64)
    for found in (forward, backward):
        close(found.sending, found.sent / bandwidth, 8)
        assert max(found.computing, found.sending) <= found.seconds * (1 + 1e-12)
        assert found.seconds <= (found.computing + found.sending) * (1 + 1e-12)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_under_a_causal_mask_contiguous_shards_take_longer_by_what_the_last_rank_has_more(ranks):
    own, unit = L * (L + 1) / 2, 4 * 16 * 64 / 1e11
    for kind, pairs in (("zigzag", own + (ranks - 1) * L * L / 2), ("contiguous", own + (ranks - 1) * L * L)):
        forward, backward = costs(kind, ranks, 1e15, layers=2)
        close(forward.seconds, 2 * pairs * unit, 64)
        close(backward.seconds, 2 * 2.5 * pairs * unit, 64)
    window = costs("contiguous", ranks, 1e9, window=L // 2)[0]
    assert window.sent == costs("contiguous", 2, 1e9)[0].sent  # a ring of two steps


def test_bytes_of_the_first_systems():
    """24 layers of 1024 positions on each of 2 ranks: 48 MiB forward, and the same back."""
    assert [found.sent for found in costs("contiguous", 2, 1e9, layers=24)] == [48 << 20, 48 << 20]


def test_a_step_with_a_message_lasts_its_latency_longer_where_that_is_what_ranks_wait_for():
    """Four ranks: three steps with messages forward, and four backward, where gradients come home in the last."""
    alone, late = (costs("contiguous", 4, 1.0, flops=1e30, latency=latency) for latency in (0, 1e9))
    for before, after, steps in zip(alone, late, (3, 4)):
        close(after.seconds, before.seconds + steps * 1e9, 64)
        assert after.sending == before.sending
    hidden = costs("contiguous", 4, 1e30, latency=1e-9), costs("contiguous", 4, 1e30)
    assert hidden[0] == hidden[1]


def test_a_rank_waits_for_the_block_of_a_neighbour_that_is_late():
    """Shards of 2, 2 and 1 positions; a pair takes 1, and a position 3 on the wire. By hand: 6 6 6, 12 12 12, 16."""
    layout = Layout("contiguous", 3, 5)
    forward, _ = cost.ring_cost(layout, flops=4, bandwidth=8 / 3, heads=1, head_dim=1, causal=False)
    close([forward.sent, forward.computing, forward.seconds], [4 * 8, 4 + 4 + 2, 16], 8)
