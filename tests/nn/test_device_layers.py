"""Layers, losses and optimizers on a GPU against the same on the host."""

import numpy as np
import pytest
from support.tolerance import bound, close, eps, largest, within

from mpipipe import arrays, nn
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError

DTYPES = ["float32", "bfloat16"]
OPERATIONS = 150  # of one layer below at most: two products over 24 to 40, 11 positions, and back, over 33 rows
FORWARD, BACKWARD = 2, 8  # roundings to half precision on either side that the largest value may show
DIM = 24
LAYERS = {
    "Linear": lambda: [nn.Linear(DIM, 40)],
    "LayerNorm": lambda: [nn.LayerNorm(DIM)],
    "Gelu": lambda: [nn.Gelu()],
    "Recompute": lambda: [nn.Recompute(nn.Sequential([nn.Linear(DIM, DIM), nn.Dropout(0.2), nn.Gelu()]))],
    "SelfAttention with grouped heads and positions": lambda: [
        nn.SelfAttention(DIM, 4, 2, attend=Local(), positions=[3, 0, 7, 11, 5, 4, 900, 2, 1, 60, 61])
    ],
    "FeedForward": lambda: [nn.FeedForward(DIM, 36)],
    "LearnedPositions": lambda: [nn.LearnedPositions(70, DIM, positions=[3, 0, 7, 11, 5, 4, 69, 2, 1, 60, 61])],
    "SelfAttention with biases and norms of heads": lambda: [
        nn.SelfAttention(
            DIM,
            4,
            2,
            Local(window=4),
            head_dim=8,
            qkv_bias=True,
            out_bias=True,
            qk_norm=True,
            rope_scaling=nn.YarnScaling(4.0, 64),
        )
    ],
    "SelfAttention with norms and learned positions": lambda: [
        nn.LearnedPositions(16, DIM, Local()),
        nn.LayerNorm(DIM),
        nn.SelfAttention(DIM, 4, attend=Local(), rope_base=None, qk_norm=True),
    ],
}
LAYERS |= {
    f"{name} with adapters": lambda make=make, targets=targets: nn.LoRA(3, 6.0, targets).apply([make()])
    for name, make, targets in (
        ("SelfAttention", lambda: nn.SelfAttention(DIM, 4, 2, Local()), ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("stacked SelfAttention", lambda: nn.SelfAttention(DIM, 4, attend=Local()), ["c_attn", "c_proj"]),
        ("FeedForward", lambda: nn.FeedForward(DIM, 36), ["c_fc", "c_proj"]),
        ("SwiGLU", lambda: nn.SwiGLU(DIM, 36), ["gate_proj", "up_proj", "down_proj"]),
    )
}
FIELDS = {  # with the shape of x
    "Conv of a plane": (lambda: [nn.Conv(4, 6, (3, 2), stride=2, groups=2)], (2, 5, 6, 4)),
    "Conv in space": (lambda: [nn.Conv(16, 32, (3, 2, 3), stride=2, groups=2, bias=False)], (1, 4, 3, 4, 16)),
    "names": (lambda: [nn.Keep("arm"), nn.Linear(6, 6), nn.AdaptiveNorm(6, 6, "arm"), nn.Join("arm")], (5, 6)),
    "Patches": (lambda: [nn.Patches((1, 2, 2), (2, 1, 2)), nn.Linear(12, 12)], (2, 2, 2, 4, 3)),
    "a field of Patches": (lambda: [nn.Patches((2, 3), (2, 2), back=True)], (2, 4, 12)),
    "SpectralConv of a plane": (lambda: [nn.SpectralConv(3, 2, (2, 3))], (2, 6, 7, 3)),
}
SHAPED = [*((make, (3, 11, DIM)) for make in LAYERS.values()), *FIELDS.values()]


def numbers(shape, dtype, seed=0, size=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(arrays.dtype(dtype))


def twins(make, dtype):
    """Equal stages on the host and on the device, with gains and biases that are not their neutral elements."""
    host, device = (nn.Stage(make(), dtype=dtype, seed=4, first=1, device=where) for where in ("cpu", "cuda"))
    for name, array in host.parameters.items():
        np.testing.assert_array_equal(arrays.download(device.parameters[name]), array)
    host.parameters.flat += numbers(host.parameters.flat.size, host.parameters.flat.dtype, 9, 0.1)
    arrays.upload(host.parameters.flat, out=device.parameters.flat)
    for stage in (host, device):
        stage.refresh()
        stage.position = nn.Position(step=3, microbatch=2, replica=1)
    return host, device


def near(found, expected, operations, roundings=1, what=""):
    """Compare a device array with a host one, relative to the largest value, which stands for the size of all terms."""
    found = arrays.download(found)
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    kind, size = expected.dtype, largest(expected)
    halves = roundings * eps(kind) * size if arrays.is_half(kind) else 0
    within(found, expected, bound(arrays.accumulator(kind), operations, size) + halves, what)


def near_gradients(device, host):
    """Gradients of half precision are float32, but what they are products of is not."""
    halves = BACKWARD * eps(host.dtype) if arrays.is_half(host.dtype) else 0
    for name, expected in host.gradients.items():
        size = largest(expected)
        allowed = bound(expected.dtype, OPERATIONS, size) + halves * size
        within(arrays.download(device.gradients[name]), expected, allowed, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make, shape", SHAPED, ids=[*LAYERS, *FIELDS])
def test_a_layer_is_the_same_on_the_device(gpu, make, shape, dtype):
    host, device = twins(make, dtype)
    x = numbers(shape, dtype, 1)
    y, saved = host.forward(x)
    dy = numbers(y.shape, dtype, 2)
    dx = host.backward(dy, saved)
    x_there, dy_there = arrays.upload(x), arrays.upload(dy)
    device.forward(x_there)  # the first one may bring tables to the device
    gpu.reset()
    crossed = gpu.crossed
    y_there, saved_there = device.forward(x_there)
    assert gpu.crossed == crossed
    dx_there = device.backward(dy_there, saved_there)
    assert gpu.synchronisations == []
    near(y_there, y, OPERATIONS, FORWARD, "output")
    near(dx_there, dx, OPERATIONS, BACKWARD, "input gradient")
    near_gradients(device, host)
    np.testing.assert_array_equal(arrays.download(x_there), x)
    np.testing.assert_array_equal(arrays.download(dy_there), dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["uint8", "int32", "int64"])
def test_embedding_takes_ids_from_either_side(gpu, kind, dtype):
    host, device = twins(lambda: [nn.Embedding(50, DIM, scale=3.0)], dtype)
    ids = np.random.default_rng(3).integers(0, 50, (4, 300)).astype(kind)
    y, saved = host.forward(ids)
    dy = numbers(y.shape, dtype, 2)
    assert host.backward(dy, saved) is None
    gpu.reset()
    outcomes = [device.forward(ids)]
    if kind != "uint8":
        outcomes.append(device.forward(arrays.upload(ids)))
    for _, saved_there in outcomes:
        arrays.set_zero(device.gradients.flat)
        assert device.backward(arrays.upload(dy), saved_there) is None
    assert gpu.synchronisations == []
    for y_there, _ in outcomes:
        np.testing.assert_array_equal(arrays.download(y_there), y)
    for name, expected in host.gradients.items():  # sums of rounded slopes, exact but for their order
        close(arrays.download(device.gradients[name]), expected, ids.size, largest(expected), what=name)


def test_inputs_that_do_not_fit_the_stage_are_refused(gpu):
    make = LAYERS["Linear"]
    on_host, on_device = nn.Stage(make()), nn.Stage(make(), device="cuda")
    x = np.ones((DIM, DIM), np.float32)
    with pytest.raises(ArgumentError, match="is on a GPU"):
        on_host.forward(arrays.upload(x))
    with pytest.raises(ArgumentError, match="wrong dtype"):
        on_device.forward(arrays.upload(x.astype(np.float64)))
    with pytest.raises(ArgumentError, match="not contiguous"):
        on_device.forward(arrays.upload(x).T)
    with pytest.raises(ArgumentError, match=r"layer 0 \(Linear\)"):
        on_device.forward(x[:, 1:])
    near(on_device.forward(x.T)[0], on_host.forward(x.T)[0], OPERATIONS)
    ids = np.array([0, 3])
    with pytest.raises(ArgumentError, match="wrong dtype"):
        on_device.forward(ids)
    with pytest.raises(ArgumentError, match="out of range"):
        nn.Stage([nn.Embedding(3, 4)], device="cuda").forward(ids)
    with pytest.raises(ArgumentError, match="out of range"):
        nn.softmax_cross_entropy(arrays.upload(np.zeros((2, 3), np.float32)), ids)
