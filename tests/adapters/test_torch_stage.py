"""One stage of PyTorch by itself: memory, structures, halves of the backward, and the traps."""

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support import torch_models  # noqa: E402
from support.gradients import gradient_norm  # noqa: E402

from mpipipe import Pipeline, adapters, nn, optim, schedules  # noqa: E402
from mpipipe.errors import ArgumentError  # noqa: E402
from mpipipe.job import inprocess  # noqa: E402
from mpipipe.nn import Position  # noqa: E402

pytestmark = pytest.mark.judges
EVALUATION = Position(training=False)


class Of(torch.nn.Module):
    """A module of a function, with a parameter."""

    def __init__(self, function, shape=(3,), dtype=torch.float64):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(1, 2, int(np.prod(shape)), dtype=dtype).reshape(shape))
        self.function = function

    def forward(self, *x, **named):
        return self.function(self, *x, **named)


def alone(stage, data, schedule=None):
    def job(comm):
        with Pipeline([stage], schedule or schedules.gpipe(1, 2), comm, loss=squared) as pipeline:
            return pipeline.step(*data)

    return inprocess.run(1, job)[0]


def squared(output, target):
    return float(np.mean((output - target) ** 2)), 2 * (output - target) / output.size


def in_halves(stage, dy, saved):
    dx, pending = stage.backward_input(dy, saved)
    before = stage.gradients.flat.copy()
    stage.backward_weight(pending)
    return dx, before


# -- memory -----------------------------------------------------------------------------------------------------------


def test_arrays_and_tensors_are_one_memory():
    module = torch.nn.Linear(3, 2, dtype=torch.float64)
    before = [p.detach().clone() for p in module.parameters()]
    theirs = torch.optim.SGD(module.parameters(), lr=1.0)  # made before the stage: parameters stay the same objects
    stage = adapters.torch_stage(module)
    for name, parameter, value in zip(("weight", "bias"), module.parameters(), before):
        assert torch.equal(parameter, value)
        assert np.shares_memory(parameter.detach().numpy(), stage.parameters.flat)
        assert np.shares_memory(parameter.grad.numpy(), stage.gradients.flat)
        assert stage.parameters[name].shape == tuple(parameter.shape)
    assert [decays for *_, decays in stage.decay_ranges] == [True, False]
    stage.gradients.flat[...] = 1
    theirs.step()
    np.testing.assert_array_equal(stage.parameters["bias"], before[1].numpy() - 1)
    x = np.ones((4, 3))
    y, saved = stage.forward(x)
    (leaf,), (output,), _ = saved[0].of_library
    assert np.shares_memory(leaf.detach().numpy(), x) and np.shares_memory(y, output.detach())


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_half_precision_goes_in_and_out(kind):
    """A module with float32 parameters that computes in half precision, as torch.autocast has it."""
    half = getattr(torch, kind)
    stage = adapters.torch_stage(Of(lambda m, x: x * m.weight.to(half), dtype=torch.float32))
    x = np.arange(6, dtype=np.dtype(getattr(ml_dtypes, kind, kind))).reshape(2, 3)
    y, saved = stage.forward(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y.astype(np.float32), [[0, 1.5, 4], [3, 6, 10]])
    assert stage.backward(y, saved).dtype == x.dtype and stage.gradients.flat.dtype == np.float32
    whole = adapters.torch_stage(torch.nn.Linear(3, 2, dtype=half))
    assert whole.parameters.flat.dtype == x.dtype
    y, saved = whole.forward(x)
    in_halves(whole, y, saved)
    assert whole.gradients.flat.astype(np.float32).any() and gradient_norm([whole]) > 0


def test_none_of_zero_grad_is_zero_and_another_gradient_is_adopted():
    stage = adapters.torch_stage(torch.nn.Linear(2, 2, dtype=torch.float64))
    stage.gradients.flat[...] = 5
    stage.module.zero_grad()
    assert stage.module.bias.grad is None
    assert not any(array.any() for array in stage.gradients.values())
    stage.module.zero_grad()
    stage.module(torch.ones(1, 2, dtype=torch.float64)).sum().backward()  # new tensors
    np.testing.assert_array_equal(stage.gradients["bias"], 1)
    assert np.shares_memory(stage.module.bias.grad.numpy(), stage.gradients.flat)


# -- structures -------------------------------------------------------------------------------------------------------


def test_what_no_output_depends_on_has_a_gradient_of_zeros():
    stage = adapters.torch_stage(Of(lambda module, a, b: (a * module.weight, torch.zeros(2))))
    for backward in (stage.backward, lambda dy, saved: in_halves(stage, dy, saved)[0]):
        _, saved = stage.forward((np.ones((2, 3)), np.ones((2, 5), np.float32)))
        da, db = backward((np.ones((2, 3)), np.zeros(2, np.float32)), saved)
        np.testing.assert_array_equal(da, [stage.module.weight.detach().numpy()] * 2)
        assert db.dtype == np.float32 and db.shape == (2, 5) and not db.any()


# -- the split backward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_the_halves_of_the_backward_are_the_whole(compiled):
    """The graph of a compiled module is one node, which frees what it has read: all is in the first half."""
    torch.manual_seed(3)
    module = torch_models.Block(8, 2).double()
    stage = adapters.torch_stage(torch.compile(module, backend="aot_eager") if compiled else module)
    x, dy = np.random.default_rng(0).normal(size=(2, 2, 3, 8))
    _, saved = stage.forward(x)
    whole, gradients = stage.backward(dy, saved), stage.gradients.flat.copy()
    _, saved = stage.forward(x)
    dx, before = in_halves(stage, dy, saved)
    np.testing.assert_array_equal(before, (1 + compiled) * gradients)
    np.testing.assert_allclose(stage.gradients.flat, 2 * gradients, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(dx, whole, rtol=1e-12, atol=1e-14)
    stage.forward(x, EVALUATION)


# -- traps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).half()), "one dtype"),
        (torch.nn.Linear(2, 2).to(torch.float8_e4m3fn), "one dtype"),
        (torch.nn.LazyLinear(2), "without a shape"),
        (torch.nn.functional.relu, "Module"),
    ],
)
def test_what_cannot_be_a_stage_is_refused(module, match):
    with pytest.raises(ArgumentError, match=match):
        adapters.torch_stage(module)


class WritesBack(torch.autograd.Function):
    """Its backward writes to the gradient that it is given."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy.mul_(2)


def test_a_backward_that_writes_to_the_gradient_that_it_is_given_is_refused():
    stage = adapters.torch_stage(Of(lambda module, x: WritesBack.apply(x * module.weight)))
    for backward in (stage.backward_input, stage.backward):
        y, saved = stage.forward(np.ones((2, 3)))
        dy = np.ones_like(y)
        dy.setflags(write=False)  # as a pipeline hands it out
        with pytest.raises(ArgumentError, match="the gradient that it is given in place"):
            backward(dy, saved)


def test_a_loss_that_writes_in_place_writes_to_copies():
    loss = adapters.torch_loss(lambda y, t: (y.mul_(2) - t.add_(1)).square().sum())
    y, t = np.ones((2, 3)), np.ones((2, 3))
    value, gradient = loss(y, t)[:2]
    assert value == 0 and not gradient.any() and (y == 1).all() and (t == 1).all()


def test_a_loss_that_needs_a_tensor_with_a_gradient_of_its_own_is_refused():
    stray = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(ArgumentError, match="neither the output nor a parameter of the loss"):
        adapters.torch_loss(lambda y, t: (stray * y - t).square().sum())(np.ones((2, 3)), np.ones((2, 3)))


def test_a_tensor_with_a_gradient_that_is_no_parameter_is_refused():
    stray = torch.ones(3, dtype=torch.float64, requires_grad=True)
    stage = adapters.torch_stage(Of(lambda module, x: x * module.weight * stray))
    with pytest.raises(ArgumentError, match="none of its parameters"):
        stage.forward(np.ones((2, 3)))


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda m: m.load_state_dict({"weight": torch.zeros(3)}, assign=True), "replaced or frozen"),
        (lambda m: m.requires_grad_(False), "replaced or frozen"),
        (lambda m: m.float(), "lies elsewhere"),
        (lambda m: setattr(m.weight, "data", m.weight.data.clone()), "lies elsewhere"),
    ],
)
def test_parameters_that_left_the_flat_array_are_refused(change, match):
    """By every way to the pipeline and to the optimizer."""
    stage = adapters.torch_stage(Of(lambda module, x: x * module.weight))
    optimizer, x = optim.SGD([stage], lr=0.1), np.ones((4, 3))

    def job(comm):
        with Pipeline([stage], schedules.gpipe(1, 2), comm, loss=squared) as pipeline:
            pipeline.step(x, x)
            change(stage.module)
            with pytest.raises(ArgumentError, match=match):
                pipeline.step(x, x)
            with pytest.raises(ArgumentError, match=match):
                optimizer.step()

    inprocess.run(1, job)


def test_zero_grad_within_a_step_is_an_error():
    """Otherwise what earlier micro-batches added would be lost without a word."""

    def forgetful(module, x):
        module.zero_grad()
        return x * module.weight

    stage = adapters.torch_stage(Of(forgetful))
    with pytest.raises(ArgumentError, match="replaced within a step") as caught:
        alone(stage, (np.ones((4, 3)), np.ones((4, 3))))
    assert "rank 0, stage 0, micro-batch" in str(caught.value)


def test_messages_move_between_the_modules_of_a_stage(monkeypatch):
    monkeypatch.setattr("mpipipe.adapters.pytorch.layer.BETWEEN_POLLS", -1.0)
    stage = adapters.torch_stage(torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4))))
    polls = []
    stage.poll = lambda: polls.append(1)
    y, saved = stage.forward(np.ones((2, 3), np.float32))
    assert len(polls) == 4
    stage.backward(y, saved)
    assert len(polls) == 8
    monkeypatch.setattr("mpipipe.adapters.pytorch.layer.BETWEEN_POLLS", 60.0)
    stage.forward(np.ones((2, 3), np.float32))
    assert len(polls) == 8  # the last one was a moment ago


def test_a_loss_of_pytorch_multiplies_before_it_rounds_and_takes_several_outputs():
    loss = adapters.torch_loss(torch.nn.functional.mse_loss)
    output, target = np.full((2, 2), 3.0, np.float16), np.ones((2, 2), np.float16)
    value, gradient = loss(output, target)
    assert value == 4 and gradient.dtype == np.float16
    np.testing.assert_array_equal(gradient, 1)
    np.testing.assert_array_equal(loss(output, target, factor=0.5)[1], 0.5)
    tiny = np.full((2, 2), 1 + 2.0**-9, np.float16)  # its gradient is half of 2^-9; scaled down alone it would vanish
    assert (loss(tiny, target, factor=2.0**13)[1] == 8).all()
    loss = adapters.torch_loss(lambda output, target: (output["a"] * target).sum())
    value, gradient = loss({"a": np.ones(3), "b": np.ones(2), "ids": np.ones(2, int)}, np.arange(3.0))
    assert value == 3 and gradient["ids"] is None
    np.testing.assert_array_equal(gradient["a"], [0, 1, 2])
    np.testing.assert_array_equal(gradient["b"], 0)


def test_a_container_of_a_module_is_put_back_with_the_objects_that_it_had():
    """Others may hold them: a generator in a list, a buffer that is in a list, too."""
    from mpipipe.adapters.pytorch.state import ModuleSnapshot

    module = torch.nn.BatchNorm1d(2)
    module.generators, module.statistics = [torch.Generator()], {"mean": module.running_mean, "seen": [0]}
    (generator,), seen = module.generators, module.statistics["seen"]
    drawn = generator.get_state()
    before = ModuleSnapshot.of(module, None)
    again = ModuleSnapshot.of(module, before).entries
    assert all(entry is before.entries[place] for place, entry in again.items() if entry.key != "num_batches_tracked")
    torch.rand(3, generator=generator)
    module(torch.ones(4, 2))
    seen[0] += 1
    module.generators.append(None)
    before.restore()
    assert module.generators == [generator] and torch.equal(generator.get_state(), drawn)
    assert module.statistics["mean"] is module.running_mean and not module.running_mean.any()
    assert module.statistics["seen"] is seen and seen == [0]


def test_a_parameter_in_three_entries_has_one_tie():
    from mpipipe.adapters import layers

    first, other = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    other.weight = first.weight
    entries = [torch.nn.Sequential(*parts) for parts in ([first], [other, torch.nn.ReLU()], [other])]
    assert not [*layers.check_entries(entries)]
    stage = nn.Stage([layers.as_layer(entry, place) for place, entry in enumerate(entries)])
    assert stage.ties == {"0.0.weight": ["0.0.weight", "1.0.weight", "2.0.weight"]}
