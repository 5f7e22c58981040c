"""Groups of parameters: each is updated as by an optimizer of its own with the group's numbers."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe import arrays, nn, optim
from mpipipe.errors import ArgumentError

LR, DECAY = 0.01, 0.1
OPTIMIZERS = {
    "AdamW": lambda stages, lr=LR, decay=DECAY, **more: optim.AdamW(stages, lr, weight_decay=decay, **more),
    "SGD": lambda stages, lr=LR, decay=DECAY, **more: optim.SGD(stages, lr, 0.9, decay, **more),
}
GROUPS = [
    optim.Group("1.*", lr=0.5),
    optim.Group(lambda name, shape: shape == (7, 5), lr=3.0, weight_decay=0.3),
    optim.Group("*.bias", lr=2.0, weight_decay=0.05),
    optim.Group("2.weight", lr=100.0),  # an earlier one has it
]
# what each parameter is updated with: factor of the learning rate, weight decay
EXPECTED = {
    "0.weight": (1, DECAY), "0.bias": (2, 0.05), "1.gain": (0.5, 0), "2.weight": (3, 0.3), "2.bias": (2, 0.05),
}  # fmt: skip


def made(dtype="float64", device="cpu"):
    return nn.Stage([nn.Linear(3, 5), nn.RMSNorm(5), nn.Linear(5, 7)], dtype, device=device)


def fill(stage, step):
    flat = np.zeros(stage.gradients.flat.size, stage.gradients.flat.dtype)
    for name, at in stage.gradients.offsets.items():
        count = stage.gradients[name].size
        flat[at : at + count] = np.random.default_rng([step, *name.encode()]).standard_normal(count)
    arrays.copy_into(stage.gradients.flat, arrays.upload(flat) if stage.device == "cuda" else flat)


class Alone:
    """One parameter, all of which decays."""

    def __init__(self, name, array):
        self.parameters, self.gradients = (nn.FlatBuffer({name: array.shape}, array.dtype) for _ in range(2))
        self.parameters[name][...] = array
        self.decay_ranges = [(0, self.parameters.flat.size, True)]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_each_parameter_is_updated_by_the_numbers_of_its_group(make):
    stage = made()
    alone = {name: Alone(name, array) for name, array in stage.parameters.items()}
    ours = make([stage], groups=GROUPS)
    theirs = {n: make([alone[n]], LR * factor, decay) for n, (factor, decay) in EXPECTED.items()}
    for step in range(3):
        fill(stage, step)
        rate = LR * (step + 1)
        ours.step(lr=rate, scale=0.5)
        for name, (factor, _) in EXPECTED.items():
            alone[name].gradients[name][...] = stage.gradients[name]
            theirs[name].step(lr=rate * factor, scale=0.5)
    for name, array in stage.parameters.items():
        np.testing.assert_array_equal(array, alone[name].parameters[name])
    assert {n: a.shape for n, a in next(iter(ours.named_state().values())).items()} == {
        name: array.shape for name, array in stage.parameters.items()
    }


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_groups_with_nothing_of_their_own_change_no_bit(make):
    stages = [made(), made()]
    both = make(stages[:1]), make(stages[1:], groups=[optim.Group("*.bias"), optim.Group("nothing", lr=9)])
    for step in range(2):
        for stage, optimizer in zip(stages, both):
            fill(stage, step)
            optimizer.step()
    np.testing.assert_array_equal(stages[0].parameters.flat, stages[1].parameters.flat)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_pieces_on_the_device_are_those_on_the_host(gpu, make, dtype):
    """With the half copy that the update rounds to."""
    stages = [made(dtype), made(dtype, "cuda")]
    both = [make([stage], groups=GROUPS) for stage in stages]
    for step in range(2):
        for stage, optimizer in zip(stages, both):
            fill(stage, step)
            optimizer.step()
            stage.refresh()
    host, device = ([arrays.download(x) for x in (s.parameters.flat, s.compute.flat)] for s in stages)
    for one, other, bits in zip(host, device, (20, 20 if dtype == "float32" else 7)):
        np.testing.assert_allclose(one.astype("float64"), other.astype("float64"), rtol=2.0**-bits, atol=1e-6)


def test_a_tied_parameter_goes_by_its_tie():
    """It has names of its own in each place, maybe on other ranks; the tie is the same."""
    stage = nn.Stage([nn.Embedding(4, 3, tie="tokens"), nn.Linear(3, 4, bias=False, tie="tokens")], "float64")
    before = stage.parameters["0.weight"].copy()
    stage.gradients["0.weight"][...] = stage.gradients["1.weight"][...] = 1
    optim.SGD([stage], LR, groups=[optim.Group("0.*", lr=5.0), optim.Group("tokens", lr=3.0)]).step()
    np.testing.assert_allclose(stage.parameters["0.weight"], before - 3 * LR, rtol=1e-14)
    np.testing.assert_allclose(stage.parameters["1.weight"], before - 3 * LR, rtol=1e-14)


def test_a_function_sees_complex_parameters_in_their_own_shape():
    shapes = {"w": (2, 3), "c": (3,)}

    class Own:
        parameters, gradients = nn.FlatBuffer(shapes, "complex64"), nn.FlatBuffer(shapes, "complex64")

    seen = {}
    optimizer = optim.SGD(
        [Own], 1.0, groups=[optim.Group(lambda name, shape: seen.setdefault(name, shape) == (3,), lr=2)]
    )
    Own.gradients["w"][...] = Own.gradients["c"][...] = 1 - 2j
    optimizer.step()
    assert seen == shapes
    np.testing.assert_array_equal(Own.parameters["w"], -1 + 2j)
    np.testing.assert_array_equal(Own.parameters["c"], -2 + 4j)


@pytest.mark.parametrize("make", [
    lambda: optim.Group("*", lr=-1), lambda: optim.Group("*", weight_decay=float("nan")),
    lambda: optim.AdamW([made()], LR, groups=[{"lr": 2}]), lambda: optim.SGD([made()], LR, groups=["*"]),
])  # fmt: skip
def test_what_is_no_group_is_refused(make):
    with pytest.raises(ArgumentError, match="group"):
        make()
