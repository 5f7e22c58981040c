"""Stage: buffers, names, initial values, binding, errors."""

import numpy as np
import pytest

from mpipipe import Pipeline, arrays, attention, nn
from mpipipe.errors import ArgumentError, BackendError
from mpipipe.job import inprocess
from mpipipe.schedules import gpipe


def layers():
    attend = attention.Local()
    return [
        nn.Embedding(11, 8, tie="tokens"),
        nn.Residual(nn.Sequential([nn.RMSNorm(8), nn.SelfAttention(8, 2, attend=attend)])),
        nn.Residual(nn.Sequential([nn.RMSNorm(8), nn.SwiGLU(8, 20)])),
        nn.LayerNorm(8),
        nn.Linear(8, 11, bias=False, tie="tokens"),
    ]


def test_initial_values_do_not_depend_on_the_cut_or_the_dtype():
    whole = nn.Stage(layers(), dtype="float64", seed=3)
    parts = [nn.Stage(layers()[:2], seed=3), nn.Stage(layers()[2:], seed=3, first=2)]
    for part in parts:
        for name, array in part.parameters.items():
            np.testing.assert_array_equal(array, whole.parameters[name].astype(np.float32))
    other = nn.Stage(layers(), dtype="float64", seed=4)
    assert (other.parameters["2.layer.1.down"] != whole.parameters["2.layer.1.down"]).all()
    np.testing.assert_array_equal(whole.parameters["0.weight"], whole.parameters["4.weight"])


def test_initial_values_have_the_promised_spread():
    layers = [
        nn.Linear(400, 500, gain=0.5), nn.Embedding(500, 400), nn.FeedForward(400, 600, gain=0.5),
        nn.Conv(16, 64, (3, 3), groups=2, gain=2.0), nn.SpectralConv(8, 16, (6, 6)),
    ]  # fmt: skip
    stage = nn.Stage(layers, dtype="float64")
    spreads = {
        "0.weight": 0.5 / 20, "1.weight": 1 / 20, "2.up": 1 / 20, "2.down": 0.5 / 600**0.5,
        "3.weight": 2 / (3 * 3 * 8) ** 0.5, "4.weight": 1 / 4,
    }  # fmt: skip
    for name, expected in spreads.items():
        weight = stage.parameters[name]
        close_to = 6 / weight.size**0.5  # six standard deviations of the mean, more of the spread
        assert abs(weight.std() / expected - 1) < close_to and abs(weight.mean()) < expected * close_to
    assert not any(stage.parameters[name].any() for name in ("0.bias", "2.up_bias", "2.down_bias", "3.bias"))
    assert stage.parameters["3.weight"].shape == (64, 3, 3, 8) and stage.parameters["4.weight"].shape[:2] == (12, 6)
    assert not layers[3].declared["bias"].decay


def test_however_many_layers_there_are_ranges_of_decay_are_few():
    """An optimizer has a launch for each: matrices, gains, and the tied matrices behind them."""
    stage = nn.Stage([*layers()[:1], *[layer for _ in range(5) for layer in layers()[1:-1]], layers()[-1]])
    assert [decay for _, _, decay in stage.decay_ranges] == [True, False, True]


def test_equal_contents_give_equal_bits_wherever_they_lie():
    outcomes = []
    for shift in (0, 1, 3, 8):
        stage = nn.Stage(layers()[1:])
        memory = np.zeros(2 * 37 * 8 + 16, np.float32)
        x = memory[shift : shift + 2 * 37 * 8].reshape(2, 37, 8)
        x[...] = np.random.default_rng(0).standard_normal(x.shape)
        y, saved = stage.forward(x)
        dx = stage.backward(y, saved)
        outcomes.append((y, dx, stage.gradients.flat))
    for outcome in outcomes[1:]:
        for one, other in zip(outcomes[0], outcome):
            np.testing.assert_array_equal(one, other)


def test_a_stage_without_parameters_works():
    stage = nn.Stage([nn.Gelu()])
    assert stage.parameters.flat.size == 0 and len(stage.gradients) == 0 and stage.decay_ranges == []
    empty = nn.Stage([])
    x = np.ones((2, 3), np.float32)
    assert empty.forward(x)[0] is x


def test_layers_cost_no_memory_before_a_stage_binds_them():
    layer = nn.SwiGLU(100_000, 400_000)
    assert not any(isinstance(value, np.ndarray) for value in vars(layer).values())


@pytest.mark.parametrize(
    "x", [np.zeros((2, 3)), np.zeros((2, 3), np.float16), np.array([[None] * 3]), [[1.0, 2.0, 3.0]]]
)
def test_an_input_of_another_dtype_is_refused(x):
    with pytest.raises(ArgumentError):
        nn.Stage([nn.Linear(3, 3)]).forward(x)


def test_wrong_arguments_are_refused():
    layer, bound = nn.Linear(3, 3), nn.Linear(3, 3)
    nn.Stage([bound])
    for layers, options, error, match in (
        ([], dict(dtype="int32"), ArgumentError, "cannot compute"),
        ([], dict(dtype="float31"), ArgumentError, "unknown dtype"),
        ([], dict(device="cuda:99"), BackendError, "GPU|cuda"),
        ([nn.Gelu], {}, ArgumentError, "not a layer"),
        ([bound], {}, ArgumentError, "already belongs"),
        ([layer, layer], {}, ArgumentError, "already belongs"),
    ):
        with pytest.raises(error, match=match):
            nn.Stage(layers, **options)


def test_a_subclass_has_its_seed_and_no_name_of_the_arrays():
    class Own(nn.Stage):
        def __init__(self, seed):
            self.seed = seed
            super().__init__([nn.Linear(3, 3)], seed=seed)

    expected = nn.Stage([nn.Linear(3, 3)], seed=4).parameters.flat
    np.testing.assert_array_equal(Own(4).parameters.flat, expected)
    for name in ("decay_ranges", "frozen", "parameters", "ties", "takes"):
        mixed = type("Mixed", (), {name: []})
        for bases, content in ((nn.Stage,), {name: []}), ((mixed, nn.Stage), {}):
            with pytest.raises(ArgumentError, match=rf"replaces what belongs to its arrays or layers\n.*Other.{name}"):
                type("Other", bases, content)
        with pytest.raises(AttributeError, match=name):
            setattr(Own(4), name, [])


def test_integers_only_where_the_first_layer_takes_them():
    ids = np.zeros((2, 3), np.int64)
    nn.Stage([nn.Sequential([nn.Embedding(4, 3)])]).forward(ids)
    with pytest.raises(ArgumentError, match="wrong dtype"):
        nn.Stage([nn.Residual(nn.Linear(3, 3))]).forward(ids)


# -- Gradients of a step start from zero, whatever they were before ---------------------------------------------------


IDS, TARGETS = np.random.default_rng(0).integers(0, 11, size=(2, 4, 6))


class Extra(nn.Linear):
    """A Linear that adds to its gradient in a way of its own."""

    def backward_weight(self, pending):
        self.weight_grad += 1
        super().backward_weight(pending)


class Unused(nn.Layer):
    """Calls its layer in no backward."""

    def __init__(self, layer):
        self.children = {"layer": layer}

    def forward(self, x):
        return x, None

    def backward_input(self, dy, saved):
        return dy, None


def with_head(head=nn.Linear):
    return [*layers()[:-1], Unused(nn.Linear(8, 8)), head(8, 11, bias=False, tie="tokens")]


def gradients(stage, before, steps=2, microbatches=2):
    """Gradients of a stage whose gradients were `before`, after some steps."""

    def run(comm):
        with Pipeline([stage], gpipe(1, microbatches), comm, loss=nn.softmax_cross_entropy) as pipeline:
            for array in stage.gradients.values():
                values = np.full(array.shape, before, array.dtype)
                arrays.copy_into(array, arrays.upload(values) if arrays.is_device(array) else values)
            for _ in range(steps):
                pipeline.step(IDS, TARGETS)
        return {name: arrays.download(array) for name, array in stage.gradients.items()}

    return inprocess.run(1, run)[0]


def summed(stage, microbatches=2):
    """The same by the layers alone, added to zeros; the tied matrix in two arrays."""
    for ids, targets in zip(np.split(IDS, microbatches), np.split(TARGETS, microbatches)):
        y, saved = stage.forward(ids)
        stage.backward(nn.softmax_cross_entropy(y, targets, factor=1 / microbatches)[1], saved)
    return {name: arrays.download(array) for name, array in stage.gradients.items()}


@pytest.mark.parametrize("device, dtype", [("cpu", "float64"), ("cuda", "bfloat16")])
def test_gradients_are_those_that_are_added_to_zeros(gpu, device, dtype):
    head = Extra if device == "cpu" else nn.Linear
    expected = summed(nn.Stage(with_head(head), dtype, device=device))
    expected["0.weight"] = expected["5.weight"] = expected["0.weight"] + expected["5.weight"]
    found = gradients(nn.Stage(with_head(head), dtype, device=device), before=np.nan)
    assert not found["4.layer.weight"].any() and not found["4.layer.bias"].any()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], name)
