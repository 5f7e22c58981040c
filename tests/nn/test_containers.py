"""Sequential, Residual and Recompute: same numbers as the layers by hand."""

import numpy as np
import pytest
from support.small_gpt import MODEL, text

from mpipipe import arrays, nn
from mpipipe.attention import Local
from mpipipe.language.models import GPT

RANDOM = np.random.default_rng(5)


def test_poll_is_called_between_layers_in_both_directions():
    calls = []
    stage = nn.Stage([nn.Linear(3, 3), nn.Sequential([nn.Gelu(), nn.Linear(3, 3)])], dtype="float64")
    stage.poll = lambda: calls.append(1)
    x = RANDOM.standard_normal((4, 3))
    y, saved = stage.forward(x)
    assert len(calls) == 2
    stage.backward(y, saved)
    assert len(calls) == 4
    _, pending = stage.backward_input(y, saved)
    stage.backward_weight(pending)
    assert len(calls) == 8


# -- Residuals with a norm: the bits of separate sums, in fewer launches ----------------------------------------------


DIM = 24


def plain(norm, *layers):
    """The same by separate layers: one that adds, and others in it."""
    return nn.Residual(nn.Sequential([norm, *layers]))


def drawn(shape, kind):
    return (RANDOM.standard_normal(shape) + 0.2).astype(arrays.dtype(kind))


def equal(found, expected):
    found, expected = (arrays.download(x) if arrays.is_device(x) else x for x in (found, expected))
    assert found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()


class DoubledNorm(nn.RMSNorm):
    """What a class of a user's may put before a norm."""

    def forward(self, x):
        y, saved = super().forward(x)
        return self.stage.kernels.scale(y, 2.0), saved

    def backward_input(self, dy, saved):
        return super().backward_input(self.stage.kernels.scale(dy, 2.0), saved)


class WithoutGradient(nn.RMSNorm):
    def backward(self, dy, saved):
        return self.stage.kernels.scale(dy, 0.0)


def blocks(residual, wrap=lambda layer: layer):
    """Residuals side by side, in a container, beside layers that take no sum, and at the end."""

    def attention():
        return wrap(residual(nn.RMSNorm(DIM), nn.SelfAttention(DIM, 4, attend=Local())))

    def mlp(norm):
        return wrap(residual(norm(DIM), nn.SwiGLU(DIM, 40), nn.Dropout(0.2)))

    return [
        attention(),
        mlp(nn.LayerNorm),
        nn.Sequential([attention(), mlp(nn.RMSNorm)]),
        nn.Sequential([nn.RMSNorm(DIM), attention(), nn.Linear(DIM, DIM)]),
        nn.Sequential([]),
        residual(DoubledNorm(DIM), nn.Linear(DIM, DIM)),
        residual(DoubledNorm(DIM)),
        residual(WithoutGradient(DIM)),
        nn.Gelu(),
        residual(nn.Sequential([])),
        mlp(nn.RMSNorm),
    ]


def passed(stage, x, dy, split):
    """What a forward and a backward find, on the host."""
    if stage.device == "cuda":
        x, dy = arrays.upload(x), arrays.upload(dy)
    y, saved = stage.forward(x, nn.Position(step=2, microbatch=1))
    if split:
        dx, pending = stage.backward_input(dy, saved)
        stage.backward_weight(pending)
    else:
        dx = stage.backward(dy, saved)
    return y, dx, stage.gradients.flat


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_recompute_gives_the_same_bits_and_keeps_only_the_input(dtype):
    kept, again = (nn.Stage(blocks(plain, wrap)[:2], dtype) for wrap in (lambda layer: layer, nn.Recompute))
    equal(kept.parameters.flat, again.parameters.flat)
    x, dy = drawn((2, 5, DIM), dtype), drawn((2, 5, DIM), dtype)
    there = nn.Position(step=7, microbatch=3)
    (y, saved), (y_again, saved_again) = kept.forward(x, there), again.forward(x, there)
    equal(y, y_again)
    again.position = nn.Position(step=9, microbatch=0, training=False)
    equal(kept.backward(dy, saved), again.backward(dy, saved_again))
    equal(kept.gradients.flat, again.gradients.flat)
    assert again.position == nn.Position(step=9, microbatch=0, training=False)
    inputs = [part[0] for part in saved_again]
    assert inputs[0] is x and all(isinstance(part, np.ndarray) for part in inputs)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("wrap", [lambda layer: layer, nn.Recompute], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_residuals_have_the_bits_of_separate_sums(gpu, device, kind, wrap, split):
    ours, theirs = (nn.Stage(blocks(each, wrap), kind, seed=5, device=device) for each in (nn.PreNormResidual, plain))
    assert list(ours.parameters) == list(theirs.parameters)
    x, dy = drawn((2, 7, DIM), kind), drawn((2, 7, DIM), kind)
    for found, expected in zip(passed(ours, x, dy, split), passed(theirs, x, dy, split)):
        equal(found, expected)


def test_the_backward_of_a_gpt_needs_no_launch_for_its_sums(emulated_gpu):
    stage = nn.Stage(GPT(**MODEL, dropout=0.1).build(Local()), "bfloat16", device="cuda")
    ids, _ = text(3)
    y, saved = stage.forward(arrays.upload(ids))
    emulated_gpu.reset()
    stage.backward(y, saved)
    residuals, back = 2 * MODEL["layers"], list(emulated_gpu.launches)
    # a gradient of a gain takes one launch to add it up; "add" would be a sum in the residual or in the gradient
    assert back.count("add") == 0 and back.count("add_parts") == residuals + 1
    assert back.count("rms_norm_backward_add") == residuals and back.count("rms_norm_backward") == 1
