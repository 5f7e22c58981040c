"""Trainings have the same bits for any number of threads, and the pool is at work in them."""

import numpy as np
import pytest
from support.pieces import SMALL, new_pool, set_sizes

from mpipipe import Pipeline, nn, optim, processor, schedules
from mpipipe.attention import Local
from mpipipe.attention.kernels import Gradients, KVBlock, OutLse, host
from mpipipe.attention.mask import Slice
from mpipipe.language.models import GPT

SIZES = dict(vocab=40, dim=48, layers=1, heads=4, kv_heads=2, hidden=64, seq_len=32, tied=True)
GPT2 = dict(SIZES, kv_heads=4, norm="layer", positions="learned", feed_forward="gelu", feed_forward_bias=True)
STEPS = 20


def trained(alone, layers, dtype, text):
    """The bytes of all parameters after some steps with clipping."""
    stage = nn.Stage(layers, dtype, seed=1)
    optimizer = optim.AdamW([stage], lr=1e-2)
    with Pipeline([stage], schedules.gpipe(1, 2), alone, loss=nn.softmax_cross_entropy) as pipeline:
        for _ in range(STEPS):
            pipeline.step(*text)
            optim.clip_by_global_norm([stage], 1.0)
            optimizer.step()
    return {name: array.tobytes() for name, array in stage.parameters.items()}


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(SIZES, "float32"), *(pytest.param(GPT2, kind, marks=pytest.mark.long) for kind in ("float64", "bfloat16"))],
)
def test_a_gpt(alone, monkeypatch, sizes, dtype):
    """With 1, 2, 3 and 4 threads."""
    text, calls = np.random.default_rng(0).integers(0, 40, (2, 4, sizes["seq_len"])), []
    model = GPT(**sizes, dropout=0.1)
    set_sizes(monkeypatch, SMALL)
    run = processor._Pool.run
    monkeypatch.setattr(processor._Pool, "run", lambda *args: (calls.append(args), run(*args))[1])
    new_pool(monkeypatch, 1)
    expected = trained(alone, model.build(Local(causal=True)), dtype, text)
    assert not calls
    for threads in (2, 3, 4):
        pool = new_pool(monkeypatch, threads)
        assert trained(alone, model.build(Local(causal=True)), dtype, text) == expected
        assert len(calls) > 100 and len(pool.wakes) == threads - 1
        calls.clear()


def test_slices_that_share_keys_add_in_their_order(monkeypatch):
    """The first has most of the work, so that another thread would be done with the second before."""
    random = np.random.default_rng(3)
    q, k, v, dout = (random.standard_normal((2, 96, 4, 8)).astype(np.float32) for _ in range(4))
    slices = [Slice(start, stop, 0, 96, None, None) for start, stop in ((0, 80), (80, 88), (88, 96))]
    block = KVBlock(q, k, v, 0.3, slices)

    def run():
        result = OutLse(np.zeros_like(q), np.full((2, 4, 96), -np.inf, np.float32))
        host.forward(block, result, False)
        gradients = Gradients(*(np.zeros_like(x) for x in (q, k, v)))
        host.backward(block, dout, result, gradients)
        return [array.tobytes() for array in (*result, *gradients)]

    set_sizes(monkeypatch, SMALL)
    new_pool(monkeypatch, 1)
    expected = run()
    new_pool(monkeypatch, 4)
    assert all(run() == expected for _ in range(10))
