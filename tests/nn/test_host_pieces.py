"""Host kernels on many pieces: a training has the same bits for any number of threads."""

from traceback import walk_stack

import numpy as np
import pytest
from support.pieces import SMALL, WIDTH, new_pool, set_sizes

from mpipipe import arrays, nn, optim, processor
from mpipipe.attention import Local

RANDOM = np.random.default_rng(11)
ROWS = (3, 30)
KERNELS = set(
    """linear linear_backward_input linear_backward_weight products sum_rows add gelu gelu_backward swiglu
    swiglu_backward norm norm_backward apply_rope embed embed_backward dropout dropout_backward mean_squared_error
    softmax_cross_entropy adamw sgd sums_of_squares scale""".split()
)


def stages(dtype):
    """(stage, input, target, loss, optimizer) of a model of text and of one of fields."""
    layers = [
        nn.Embedding(40, WIDTH, scale=2.0),
        nn.Dropout(0.2),
        nn.PreNormResidual(nn.RMSNorm(WIDTH), nn.SelfAttention(WIDTH, 6, 3, Local())),
        nn.Residual(nn.Sequential([nn.LayerNorm(WIDTH), nn.FeedForward(WIDTH, 80)])),
        nn.PreNormResidual(nn.RMSNorm(WIDTH), nn.SwiGLU(WIDTH, WIDTH)),
        nn.Linear(WIDTH, 40),
    ]
    text = nn.Stage(layers, dtype)
    yield text, *RANDOM.integers(0, 40, (2, *ROWS)), nn.softmax_cross_entropy, optim.AdamW([text], 0.1)
    fields = nn.Stage([nn.Conv(4, 6, (3, 3)), nn.Gelu(), nn.SpectralConv(6, 6, (6, 7))], dtype)
    x, target = (RANDOM.standard_normal((5, 15, 16, size)).astype(arrays.dtype(dtype)) for size in (4, 6))
    yield fields, x, target, nn.mean_squared_error, optim.SGD([fields], 0.1, momentum=0.9)


def trained(dtype):
    """All numbers of two steps of each model, as bytes."""
    RANDOM.bit_generator.state = np.random.default_rng(7).bit_generator.state
    found = []
    for stage, x, target, loss, optimizer in stages(dtype):
        stage.optimizer_writes_compute()
        for _ in range(2):
            y, saved = stage.forward(x)
            value, dy = loss(y, target, 3.0)
            stage.gradients.flat.fill(0)
            stage.backward(dy, saved)
            norm = optim.scaled_step(optimizer, optim.LossScaler(1.0, dynamic=False), 0.5)
            found += [value, y, norm, stage.gradients.flat.copy(), stage.parameters.flat.copy()]
        found.append(stage.compute.flat)
    return [np.asarray(value).tobytes() for value in found]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_training_has_the_same_bits_for_all_numbers_of_threads(monkeypatch, dtype):
    """That the numbers are right in pieces, too, is in test_kernel_formulas.py."""
    cut, run = set(), processor._Pool.run

    def noted(pool, *rest):
        cut.update(frame.f_code.co_name for frame, _ in walk_stack(None))
        run(pool, *rest)

    monkeypatch.setattr(processor._Pool, "run", noted)
    set_sizes(monkeypatch, SMALL)
    results = []
    for threads in (1, 2, 3, 4):
        new_pool(monkeypatch, threads)
        results.append(trained(dtype))
    assert results == [results[0]] * 4
    assert not KERNELS - cut, "these had one piece: the test shows nothing of them"
