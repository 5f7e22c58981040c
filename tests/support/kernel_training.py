"""Trainings of two models by which all kernels but those for complex numbers are used, on the host or on a GPU."""

import numpy as np

from mpipipe import arrays, nn, optim
from mpipipe.attention import Local

ROWS = (3, 30)


def models(dtype, device, width):
    """(stage, input, target, loss, optimizer) of a model of text and of one of fields."""
    layers = [
        nn.Embedding(40, width, scale=2.0),
        nn.Dropout(0.2),
        nn.PreNormResidual(nn.RMSNorm(width), nn.SelfAttention(width, 6, 3, Local())),
        nn.Residual(nn.Sequential([nn.LayerNorm(width), nn.FeedForward(width, 80)])),
        nn.PreNormResidual(nn.RMSNorm(width), nn.SwiGLU(width, 72)),
        nn.Linear(width, 40),
    ]
    random = np.random.default_rng(7)
    text = nn.Stage(layers, dtype, device=device)
    yield text, *random.integers(0, 40, (2, *ROWS)), nn.softmax_cross_entropy, optim.AdamW([text], 0.1)
    fields = nn.Stage([nn.Conv(4, 6, (3, 3)), nn.Gelu(), nn.SpectralConv(6, 6, (6, 7))], dtype, device=device)
    x, target = (random.standard_normal((5, 15, 16, size)).astype(arrays.dtype(dtype)) for size in (4, 6))
    yield fields, x, target, nn.mean_squared_error, optim.SGD([fields], 0.1, momentum=0.9)


def trained(dtype, device="cpu", width=72):
    """All arrays of two steps of each model, on the host."""
    found = []
    for stage, x, target, loss, optimizer in models(dtype, device, width):
        stage.optimizer_writes_compute()
        if device == "cuda":
            x, target = arrays.upload(x), arrays.upload(target)
        for _ in range(2):
            y, saved = stage.forward(x)
            value, dy = loss(y, target, 3.0)
            arrays.set_zero(stage.gradients.flat)
            stage.backward(dy, saved)
            norm = float(optim.scaled_step(optimizer, optim.LossScaler(1.0, dynamic=False), 0.5))
            flat = [arrays.copy(x.flat) for x in (stage.gradients, stage.parameters, stage.compute)]
            found += [np.asarray(norm), *arrays.download(y, np.asarray(value) if device == "cpu" else value, *flat)]
    return found
