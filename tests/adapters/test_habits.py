"""Habits of PyTorch: what modules do besides computing is what they do in one process, in whatever way they run here.

The judge is PyTorch in one process: micro-batch after micro-batch, forward, loss, backward, in float64. Compared are
losses, all gradients and all buffers of three steps with plain descent, to 1e-12.
"""

import copy
import random
from collections import deque, namedtuple
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402
from torch.utils.checkpoint import checkpoint as recomputed  # noqa: E402

from mpipipe import Mesh, Pipeline, adapters, checkpoint, cut, schedules  # noqa: E402
from mpipipe.checkpoint.contents import contents_of, share_of, state_names  # noqa: E402
from mpipipe.errors import ArgumentError, MismatchError  # noqa: E402
from mpipipe.job import inprocess  # noqa: E402
from mpipipe.nn import Position  # noqa: E402
from mpipipe.train import Task  # noqa: E402
from mpipipe.train.rehearsal import check_task  # noqa: E402

pytestmark = pytest.mark.judges
WIDTH, ROWS, MICROBATCHES, STEPS = 4, 3, 4, 3
CASES = {}


def case(function):
    """A function that makes the list of modules of a model."""
    CASES[function.__name__] = function
    return function


class Of(torch.nn.Module):
    """A linear map and other attributes, and a function that makes its output of the module and the input."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.linear = linear()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *x, **parts):
        return self.function(self, *x, **parts)


def linear():
    return torch.nn.Linear(WIDTH, WIDTH)


def placed(before, after, **attributes):
    """The case of a model in which a module of this function, with new attributes, is among linear ones."""

    def register(function):
        def make():
            made = {name: make_one() for name, make_one in attributes.items()}
            return [*(linear() for _ in range(before)), Of(function, **made), *(linear() for _ in range(after))]

        CASES[function.__name__] = make
        return function

    return register


first, middle, last = partial(placed, 0, 1), partial(placed, 1, 1), partial(placed, 1, 0)


def around(function):
    return [linear(), Of(function), linear()]


CASES["plain"] = lambda: [linear(), torch.nn.Tanh(), linear()]


# -- state -------------------------------------------------------------------------------------------------------------


class Running(torch.nn.Module):
    def __init__(self, update):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.linear, self.update = linear(), update

    def forward(self, x):
        self.update(self, x.detach().mean(0))
        return self.linear(x - self.mean)


def replace(self, mean):
    self.mean = 0.9 * self.mean + 0.1 * mean


CASES |= {
    "batch_norm": lambda: [linear(), torch.nn.BatchNorm1d(WIDTH), linear()],
    "batch_norm_of_all_batches": lambda: [linear(), torch.nn.BatchNorm1d(WIDTH, momentum=None), linear()],
    "batch_norm_without_statistics": lambda: [torch.nn.BatchNorm1d(WIDTH, track_running_stats=False), linear()],
    "mean_by_data": lambda: [linear(), Running(lambda self, mean: self.mean.data.mul_(0.9).add_(0.1 * mean))],
    "mean_replaced": lambda: [linear(), Running(replace)],
    "spectral_norm": lambda: [parametrizations.spectral_norm(linear()), linear()],
    "weight_norm": lambda: [parametrizations.weight_norm(linear()), linear()],
}


@last()
def counter_in_an_attribute(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return self.linear(x) / self.calls


@first(seen=list)
def list_that_grows(self, x):
    self.seen.append(0.5)
    return self.linear(x) * sum(self.seen)


@first(counts=dict, seen=set, window=lambda: deque(maxlen=3))
def containers_that_grow(self, x):
    self.counts["n"] = self.counts.get("n", 0) + 1
    self.seen.add(self.counts["n"])
    self.window.append(len(self.seen) + 1.0)
    return self.linear(x) * sum(self.window) / self.counts["n"]


@first(array=lambda: np.ones(1))
def numpy_array_in_an_attribute(self, x):
    self.array += 0.25
    return self.linear(x) * float(self.array[0])


@last(centre=lambda: torch.zeros(()))
def tensor_in_an_attribute(self, x):
    self.centre = 0.5 * self.centre + 0.5 * x.detach().mean()
    return self.linear(x - self.centre)


@last()
def table_that_is_made_when_needed(self, x):
    if not hasattr(self, "table"):
        self.table = torch.arange(4.0)
    self.table = self.table + 1
    return self.linear(x * self.table)


@last(mean=lambda: torch.nn.Buffer(torch.zeros(WIDTH), persistent=False))
def buffer_that_is_not_persistent(self, x):
    self.mean = 0.5 * self.mean + x.detach().mean(0)
    return self.linear(x - self.mean)


@last(generator=lambda: torch.Generator().manual_seed(5))
def generator_of_its_own(self, x):
    return self.linear(x) * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


def times_random(self, x):
    return self.linear(x) * self.generator.random()


CASES |= {
    "generator_of_numpy": lambda: [linear(), Of(times_random, generator=np.random.default_rng(5))],
    "generator_of_python": lambda: [linear(), Of(times_random, generator=random.Random(5))],
}


# -- hooks -------------------------------------------------------------------------------------------------------------


def hooked(register):
    def forward(self, x):
        y = self.linear(x)
        if y.requires_grad:
            register(y)
        return torch.tanh(y)

    return around(forward)


def half_of_each(gradients, _):
    return tuple(None if gradient is None else 0.5 * gradient for gradient in gradients)


CASES |= {
    "hook_of_a_tensor": lambda: hooked(lambda y: y.register_hook(lambda gradient: 0.1 * gradient)),
    "prehook_of_a_node": lambda: hooked(lambda y: y.grad_fn.register_prehook(lambda gradients: (0.1 * gradients[0],))),
    "hook_of_a_node": lambda: hooked(lambda y: y.grad_fn.register_hook(half_of_each)),
    "retained_gradient": lambda: hooked(lambda y: y.retain_grad()),
}


@middle()
def hook_of_an_input(self, x):
    if x.requires_grad:
        x.register_hook(lambda gradient: 3 * gradient)
    return self.linear(x)


@case
def full_backward_hook():
    module = linear()
    module.register_full_backward_hook(lambda module, inputs, outputs: half_of_each(inputs, outputs))
    return [linear(), torch.nn.Sequential(linear(), module), linear()]


@case
def hooks_of_an_entry():
    first, last = linear(), linear()
    first.register_forward_hook(lambda module, inputs, output: 2 * output)
    last.register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))
    return [first, last]


@case
def hook_of_a_parameter():
    module = linear()
    module.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return [linear(), module]


@case
def hook_after_the_sum():
    def half(weight):
        weight.grad.mul_(0.5)

    module = linear()
    module.weight.register_post_accumulate_grad_hook(half)
    return [linear(), module]


# -- functions, checkpoints, writes in place ---------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


CASES |= {
    "function_with_parameters": lambda: around(lambda self, x: Scaled.apply(self.linear(x), self.linear.bias)),
    "checkpoint_within": lambda: around(lambda self, x: recomputed(self.linear, x, use_reentrant=False)),
    "reentrant_checkpoint_within": lambda: around(lambda self, x: recomputed(self.linear, x, use_reentrant=True)),
    "inplace_first": lambda: [linear(), torch.nn.ReLU(inplace=True), linear()],
    "detached_branch": lambda: [linear(), Of(lambda self, x: self.linear(x) + self.linear(x).detach())],
    "output_that_is_the_input": lambda: [linear(), torch.nn.Identity(), linear()],
    "output_that_is_a_view": lambda: [linear(), torch.nn.Unflatten(1, (2, 2)), torch.nn.Flatten(), linear()],
    "parameter_that_is_not_used": lambda: [Of(call_linear, other=torch.nn.Parameter(torch.ones(3))), linear()],
}


def call_linear(self, x):
    return self.linear(x)


@middle()
def add_to_the_input(self, x):
    x += 1
    return self.linear(x)


@first()
def clamp_of_the_data(self, x):
    x.data.clamp_(-0.5, 0.5)
    return self.linear(x)


@middle()
def autocast_within(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.linear(x.float(), self.linear.weight.float())
    return y.double() + self.linear.bias


# -- dtypes and trees between parts ------------------------------------------------------------------------------------


def between(first, second):
    return [linear(), Of(first), Of(second)]


def product(self, x, other):
    return self.linear(x) * other


Both = namedtuple("Both", "left right")
CASES |= {
    "booleans_between": lambda: between(lambda self, x: (self.linear(x), x > 0), product),
    "integers_between": lambda: between(lambda self, x: (self.linear(x), (4 * x).long()), product),
    "singles_between": lambda: between(lambda self, x: self.linear(x).float(), lambda self, x: self.linear(x.double())),
    "halves_between": lambda: between(lambda self, x: self.linear(x).half(), lambda self, x: self.linear(x.double())),
    "bfloat16_between": lambda: between(
        lambda self, x: self.linear(x).bfloat16(), lambda self, x: self.linear(x.double())
    ),
    "complex_between": lambda: between(
        lambda self, x: torch.complex(self.linear(x), x), lambda self, x: self.linear(x.real * x.imag)
    ),
    "dict_between": lambda: between(
        lambda self, x: {"b": x, "a": self.linear(x)}, lambda self, a, b: self.linear(a) * b
    ),
    "named_tuple_between": lambda: between(
        lambda self, x: Both(self.linear(x), x), lambda self, left, right: self.linear(left - right)
    ),
    "list_between": lambda: between(lambda self, x: [self.linear(x), x], product),
    "result_that_is_not_used": lambda: between(
        lambda self, x: (self.linear(x), x * 2), lambda self, x, other: self.linear(x)
    ),
    "nothing_between": lambda: between(
        lambda self, x: (self.linear(x), x[:, :0] * 2), lambda self, x, empty: self.linear(x) + empty.sum()
    ),
}


# -- parameters of other kinds -----------------------------------------------------------------------------------------


def bare(function, **attributes):
    """A module that has these attributes and no linear map."""
    return Of(function, linear=None, **attributes)


def turning(size):
    return torch.nn.Parameter(torch.randn(size, dtype=torch.complex128))


CASES |= {
    "complex_parameters_alone": lambda: [
        linear(),
        bare(lambda self, x: (x * self.weight).abs(), weight=turning(WIDTH)),
        linear(),
    ]
}


@case
def complex_parameters_beside_real_ones():
    def spectral():
        return bare(filtered, weight=turning(3), bias=torch.nn.Parameter(torch.zeros(WIDTH)))

    def filtered(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH) + self.bias

    return [spectral(), torch.nn.GELU(), spectral()]


@first(ik=lambda: torch.nn.Buffer(1j * torch.arange(3.0, dtype=torch.float64)))
def complex_buffer(self, x):
    return torch.fft.irfft(torch.fft.rfft(self.linear(x)) * self.ik, n=WIDTH)


@last(table=lambda: torch.nn.Parameter(torch.arange(3, 6), requires_grad=False))
def integers_that_are_parameters(self, x):
    return self.linear(x) * self.table[0]


# -- parameters and inputs in several places of a graph ----------------------------------------------------------------


CASES |= {
    "branch_with_work_of_its_own": lambda: around(lambda self, x: torch.tanh(x) * torch.exp(self.linear.bias).sum()),
    "parameter_alone": lambda: around(lambda self, x: x.sum() * 0 + self.linear.weight[:1] * x.new_ones(len(x), 1)),
    "two_ways_to_the_input": lambda: around(lambda self, x: torch.tanh(self.linear(x)) + x * x),
    "result_in_place": lambda: around(lambda self, x: self.linear(x).mul_(2).add_(self.linear.bias)),
}


# -- ties and sharing --------------------------------------------------------------------------------------------------


@middle()
def shared_within(self, x):
    return self.linear(torch.tanh(self.linear(x)))


def tied(*others):
    """Linear maps with the weight of the first one."""
    for module in others[1:]:
        module.weight = others[0].weight
    return others


@case
def tied_weights():
    first, last = tied(linear(), linear())
    return [first, torch.nn.Tanh(), last]


@case
def shared_part():
    shared = linear()
    return [torch.nn.Sequential(shared, torch.nn.Tanh()), linear(), torch.nn.Sequential(linear(), shared)]


@case
def tied_and_frozen():
    first, tanh, last = tied_weights()
    first.weight.requires_grad_(False)
    return [first, tanh, last]


# -- modes, freezing, well-known modules -------------------------------------------------------------------------------


@case
def part_in_evaluation():
    encoder = torch.nn.Sequential(linear(), torch.nn.Dropout(0.5)).eval().requires_grad_(False)
    return [encoder, linear()]


@case
def frozen_bias():
    module = linear()
    module.bias.requires_grad_(False)
    return [linear(), module, linear()]


CASES |= {
    "recurrence": lambda: [
        linear(),
        bare(
            lambda self, x: self.lstm(x.unflatten(1, (2, 2)))[0][:, -1], lstm=torch.nn.LSTM(2, WIDTH, batch_first=True)
        ),
    ]
}


# -- the judge ---------------------------------------------------------------------------------------------------------


def made(name):
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        return CASES[name]()
    finally:
        torch.set_default_dtype(torch.float32)


def data():
    generator = np.random.default_rng(0)
    return [generator.normal(size=(STEPS, MICROBATCHES * ROWS, WIDTH)) for _ in range(2)]


def mean(output, target):
    return functional.mse_loss(output.flatten(1), target.flatten(1))


def parameters_of(layers):
    """{name: parameter}, a shared one by the name of its first place."""
    found, seen = {}, set()
    for place, layer in enumerate(layers):
        for name, each in layer.named_parameters():
            if id(each) not in seen:
                seen.add(id(each))
                found[f"{place}.{name}"] = each
    return found


def judged(name):
    """(losses, gradients of the last step, buffers) of PyTorch alone."""
    layers, losses = made(name), []
    for x, target in zip(*data()):
        total = 0.0
        for each in parameters_of(layers).values():
            each.grad = None
        for rows, goal in zip(np.split(x, MICROBATCHES), np.split(target, MICROBATCHES)):
            y = torch.from_numpy(rows.copy())
            for layer in layers:
                y = layer(*y) if isinstance(y, (tuple, list)) else layer(**y) if isinstance(y, dict) else layer(y)
            loss = mean(y, torch.from_numpy(goal)) / MICROBATCHES
            loss.backward()
            total += float(loss)
        losses.append(total)
        with torch.no_grad():
            for each in parameters_of(layers).values():
                if each.grad is not None:
                    each -= 0.1 * each.grad
    gradients = {
        key: torch.zeros_like(each) if each.grad is None else each.grad
        for key, each in parameters_of(layers).items()
        if each.requires_grad
    }
    buffers = {f"{place}.{key}": each for place, layer in enumerate(layers) for key, each in layer.named_buffers()}
    return losses, gradients, buffers


def real(tensor):
    array = tensor.detach().numpy()
    return np.stack([array.real, array.imag], -1) if array.dtype.kind == "c" else array


def trained(comm, stages, schedule, loss, **options):
    """(results of all steps, gradients of the last one) of plain descent."""
    results, gradients, last = [], {}, comm.rank == comm.size - 1
    with Pipeline(stages, schedule, comm, loss=loss, **options) as pipeline:
        for x, target in zip(*data()):
            before = x.copy()
            results.append(pipeline.step(None if comm.rank else x, target if last else None))
            np.testing.assert_array_equal(x, before)
            gradients = {key: array.copy() for stage in stages for key, array in stage.gradients.items()}
            for stage in stages:
                stage.parameters.flat[...] -= 0.1 * stage.gradients.flat
    return results, gradients


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [schedules.one_f_one_b, schedules.zero_bubble_h1])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_module_is_trained_as_in_one_process(name, ranks, make, recompute):
    losses, gradients, buffers = judged(name)
    schedule = make(ranks, MICROBATCHES)
    models = [made(name) for _ in range(ranks)]  # not by the threads, which share the generator of PyTorch

    def job(comm):
        stages = cut(models[comm.rank], schedule, comm.rank, dtype="float64")
        results, kept = trained(comm, stages, schedule, adapters.torch_loss(mean), recompute=recompute)
        state = {}
        for stage in stages:
            for layer in stage.layers:
                for key, each in layer.entry.named_buffers():
                    state[f"{layer.name}.{key}"] = each
        return [result.loss for result in results], kept, state

    each_rank = inprocess.run(ranks, job)
    for found, _, _ in each_rank:
        np.testing.assert_allclose(found, losses, rtol=1e-12, atol=1e-12)
    kept = {key: array for _, part, _ in each_rank for key, array in part.items()}
    for key, expected in gradients.items():
        np.testing.assert_allclose(kept[key], real(expected), rtol=1e-11, atol=1e-12, err_msg=key)
    state = {key: each for _, _, part in each_rank for key, each in part.items()}
    assert {*state} == {*buffers}
    for key, expected in buffers.items():
        np.testing.assert_allclose(real(state[key]), real(expected), rtol=1e-12, atol=1e-12, err_msg=key)


# -- a loss with parameters and random numbers, ties by name, replicas -------------------------------------------------


class Temperature(torch.nn.Module):
    """A mean square over a temperature that is learned, of outputs with noise."""

    def __init__(self):
        super().__init__()
        self.log_scale = torch.nn.Parameter(torch.full((), 0.5, dtype=torch.float64))

    def forward(self, output, target):
        noise = torch.randn(output.shape, dtype=output.dtype) if self.training else 0
        return ((output + 0.1 * noise - target) ** 2).mean() * torch.exp(-self.log_scale) + self.log_scale


def trained_with_loss(way, pair=None, seed=0, make=schedules.one_f_one_b):
    """(losses, parameter of the loss): on one rank, or on two that are processes, for these have generators each."""
    ranks = 1 if pair is None else 2
    schedule, models = make(ranks, MICROBATCHES), [made("plain") for _ in range(ranks)]
    if ranks == 2 and way == "stage":
        models = [[torch.nn.Sequential(*parts[:2]), parts[2]] for parts in models]
    elif way == "stage":
        models = [[torch.nn.Sequential(*parts)] for parts in models]
    losses = [adapters.torch_loss(Temperature()) for _ in range(ranks)]

    def job(comm):
        loss, last = losses[comm.rank], comm.rank == ranks - 1
        if way == "stage":
            stages = [adapters.torch_stage(models[comm.rank][comm.rank], loss=loss if last else None, seed=seed)]
        else:
            stages = cut([*models[comm.rank], loss], schedule, comm.rank, dtype="float64", seed=seed)
        results, _ = trained(comm, stages, schedule, loss)
        return [result.losses for result in results], float(loss.module.log_scale)

    return inprocess.run(1, job)[0] if pair is None else pair.bcast(job(pair), 1)


@pytest.mark.parametrize("way", ["stage", "list"])
def test_a_loss_with_parameters_and_random_numbers_is_trained_on_any_ranks(way, pair):
    losses, scale = trained_with_loss(way)
    assert scale != 0.5 and len({*map(tuple, losses)}) == STEPS
    for make in (schedules.one_f_one_b, schedules.zero_bubble_h1):
        again, other = trained_with_loss(way, pair, make=make)
        np.testing.assert_allclose(again, losses, rtol=1e-12)
        assert other == pytest.approx(scale, rel=1e-12)
    seeded, _ = trained_with_loss(way, seed=1)
    assert np.abs(np.subtract(seeded, losses)).min() > 1e-9


@pytest.mark.parametrize("way", ["stage", "function"])
def test_modules_are_tied_by_name_where_no_identity_is_seen(way):
    losses, gradients, _ = judged("tied_weights")
    schedule = schedules.one_f_one_b(2, MICROBATCHES)
    models = [made("tied_weights") for _ in range(2)]

    def job(comm):
        first, tanh, last = models[comm.rank]
        if way == "stage":
            part = (torch.nn.Sequential(first, tanh), last)[comm.rank]
            name = ("0.weight", "weight")[comm.rank]
            stages = [adapters.torch_stage(part, prefix=f"{comm.rank}.", ties={name: "shared"})]
        else:
            entries = [adapters.with_skips(lambda: first, ties={"weight": "shared"}), tanh,
                       adapters.with_skips(lambda: last, ties={"weight": "shared"})]  # fmt: skip
            stages = cut(entries, schedule, comm.rank, dtype="float64")
        return trained(comm, stages, schedule, adapters.torch_loss(mean))

    for results, kept in inprocess.run(2, job):
        np.testing.assert_allclose([result.loss for result in results], losses, rtol=1e-12)
        weight = next(array for name, array in kept.items() if name.endswith("weight"))
        np.testing.assert_allclose(weight, gradients["0.weight"], rtol=1e-11, atol=1e-12)


def test_a_tie_of_no_parameter_is_refused():
    with pytest.raises(ArgumentError, match=r"a tie names no parameter: 'bias\.x'"):
        adapters.torch_stage(torch.nn.Linear(2, 2), ties={"bias.x": "shared"})


def test_replicas_begin_with_the_state_of_the_first_and_refuse_other_parameters(pair, mpi_tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).double()
    with torch.no_grad():
        module[0].weight.fill_(1)
        module[0].bias.fill_(1)
        module[1].running_mean += 1 + pair.rank
    stage, schedule = adapters.torch_stage(module), schedules.gpipe(1, 2)
    loss, alone = adapters.torch_loss(mean), pair.Split(pair.rank, 0)
    x = np.random.default_rng(pair.rank).normal(size=(4, 2))
    with Pipeline([stage], schedule, alone, loss=loss, replicas=pair) as pipeline:
        assert (module[1].running_mean == 1).all()
        pipeline.step(x, x)
        means = pair.allgather(module[1].running_mean.numpy().copy())
        assert not np.allclose(*means)
        with Mesh(pair, pipe=1) as mesh:
            checkpoint.check_replicas(mesh, [stage])
            path = checkpoint.save(mpi_tmp_path, mesh, [stage], step=1)
            share = share_of(contents_of([stage], None), mesh.replicas, state_names([stage]))
            for name, buffer in module[1].named_buffers():  # a copy: the next forward comes while a thread writes
                assert (f"parameters/1.{name}" in share) == (pair.rank == 0)
                assert not any(np.shares_memory(buffer.numpy(), array) for array in share.values())
            checkpoint.load(path, mesh, [stage])
        np.testing.assert_array_equal(module[1].running_mean, means[0])
    stage.parameters["0.weight"][...] += pair.rank
    with pytest.raises(MismatchError, match="the replicas of a pipeline differ"):
        Pipeline([stage], schedule, alone, loss=loss, replicas=pair)
    alone.Free()


# -- what is refused, with its name ------------------------------------------------------------------------------------


def refused(module, match, change=lambda module: None):
    """A step of this module, and another one after a change, raise this error."""
    x = np.ones((4, WIDTH))

    def job(comm):
        with pytest.raises(ArgumentError, match=match):
            with Pipeline(
                [adapters.torch_stage(module)], schedules.gpipe(1, 2), comm, loss=adapters.torch_loss(mean)
            ) as p:
                p.step(x, x)
                change(module)
                p.step(x, x)

    inprocess.run(1, job)


def test_what_cannot_be_right_is_refused_by_name():
    @dataclass
    class Output:
        y: object

    double = torch.nn.Linear(WIDTH, WIDTH).double()
    refused(Of(lambda self, x: Output(x)).double(), "the output of a module")
    refused(Of(lambda self, x: (self.linear(x), None)).double(), "the output of a module")
    refused(torch.nn.Sequential(double, torch.nn.SyncBatchNorm(WIDTH)).double(), "SyncBatchNorm")
    elsewhere = torch.nn.Linear(WIDTH, WIDTH, device="meta")
    for module in (elsewhere, torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), elsewhere)):
        refused(module, "a device that arrays do not know")
    counts = torch.nn.Sequential(linear(), torch.nn.BatchNorm1d(WIDTH))
    with pytest.raises(ArgumentError, match=r"with buffers is in two layers, 0\.0 and 1\.0"):
        cut([torch.nn.Sequential(counts), torch.nn.Sequential(counts)], schedules.gpipe(1, 2), 0)
    refused(double, "the parameter weight .* no longer frozen", lambda module: module.weight.requires_grad_(False))
    half = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)).double()
    half[0].requires_grad_(False)
    refused(half, r"the parameter 0\.\w+ .* no longer frozen", lambda module: module.requires_grad_(True))
    new = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)).double()
    refused(new, r"the parameter 1\.\w+ ", lambda module: module.append(torch.nn.Linear(WIDTH, WIDTH)))


def test_an_evaluation_puts_all_parts_into_eval_and_back():
    module, seen = torch.nn.Sequential(linear(), torch.nn.Dropout(0.5).eval(), torch.nn.Tanh()).double(), []
    module.register_forward_pre_hook(lambda module, x: seen.append([part.training for part in module.modules()]))
    stage = adapters.torch_stage(module)
    for training in (True, False, True):
        stage.forward(np.ones((2, WIDTH)), Position(training=training))
    assert seen == [[True, True, False, True], [False] * 4, [True, True, False, True]]


def test_a_buffer_that_entries_share_must_stay_as_it_is():
    """On one rank it is one tensor, on two there are two of them; also where entries have no parameters."""
    for changes, bare in ((False, False), (True, False), (False, True), (True, True)):
        first, last = (Running(lambda self, mean: self.mean.add_(mean) if changes else None) for _ in range(2))  # noqa: B023
        if bare:
            first.linear, last.linear = torch.nn.Identity(), torch.nn.Identity()
        entries = [part.double() for part in (first, last, *([linear()] if bare else []))]
        last.mean = first.mean

        def job(comm):
            schedule, (x, target) = schedules.one_f_one_b(comm.size, 2), (each[0] for each in data())
            stages = cut(entries, schedule, comm.rank, dtype="float64")  # noqa: B023
            with Pipeline(stages, schedule, comm, loss=adapters.torch_loss(mean)) as pipeline:
                pipeline.step(x, target)
                if changes:  # noqa: B023
                    with pytest.raises(ArgumentError, match="a buffer that several entries share has changed"):
                        pipeline.step(x, target)
                else:
                    pipeline.step(x, target)

        inprocess.run(1, job)


# -- what `train FILE.py --check` finds on one process -----------------------------------------------------------------


class Hooked(Task):
    loss = adapters.torch_loss(Temperature())
    tied = True

    def layers(self, shard):
        def marked(self, x):
            y = self.linear(x)
            if y.requires_grad:
                y.register_hook(torch.clone)
            return y, x > 0

        first, hooked, last = linear(), Of(marked), linear()
        if self.tied:
            last.weight = first.weight
        masked = Of(lambda self, x, mask: self.linear(x) * mask)
        return [first, torch.nn.BatchNorm1d(WIDTH), hooked, masked, last]

    def batch(self, step, rows, shard):
        x = np.random.default_rng(step).normal(size=(8, WIDTH))[rows.start : rows.stop]
        return x, np.tanh(x)

    validation = batch


def test_check_says_what_it_looked_at():
    (found,) = inprocess.run(1, lambda comm: check_task(Hooked(), 0, comm))
    lines, right = found
    assert right, lines
    assert lines[-1].startswith("loss: ") and "random numbers" in lines[-1]


def valid_mean(output, target):
    return functional.cross_entropy(output, target), (target != -100).sum()


def sum_of_valid(output, target):
    count = (target != -100).sum()
    return functional.cross_entropy(output, target, reduction="sum") / count, count


class Tempered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, output, target):
        return valid_mean(output * self.temperature, target)


@pytest.mark.parametrize("loss", [functional.cross_entropy, valid_mean, sum_of_valid, Tempered()])
@pytest.mark.parametrize("ranks, make", [(1, schedules.zero_bubble_h1), (2, schedules.one_f_one_b)])
def test_a_mean_over_some_entries_counts_by_rows_or_by_what_comes_with_it(ranks, make, loss):
    """Without a number of its own each micro-batch counts by its rows, as in a loop of PyTorch that adds gradients."""
    counts = loss is not functional.cross_entropy
    x = np.random.default_rng(0).normal(size=(8, 4))
    goal = np.array([0, -100, 2, 3, -100, -100 if counts else 2, 1, 0])  # a micro-batch in which nothing counts
    modules = [torch.nn.Linear(4, 4).double() for _ in range(2)]
    judges, judge_of_loss = copy.deepcopy(modules), copy.deepcopy(loss)
    output, goals = judges[1](judges[0](torch.from_numpy(x))), torch.from_numpy(goal)
    if counts:
        value, _ = judge_of_loss(output, goals)
    else:
        value = sum(map(functional.cross_entropy, output.split(2), goals.split(2))) / 4
    value.backward()
    schedule = make(ranks, 4)
    if isinstance(loss, torch.nn.Module):
        judges.append(judge_of_loss)

    def job(comm):
        own = adapters.torch_loss(copy.deepcopy(loss))
        entries = copy.deepcopy(modules) + [own] * (len(judges) - 2)
        stages = cut(entries, schedule, comm.rank, dtype="float64")
        with Pipeline(stages, schedule, comm, loss=own) as pipeline:
            for _ in range(2):  # the first step presumes other weights
                result = pipeline.step(x if stages.is_first else None, goal if stages.is_last else None)
        return result.loss, {name: array for stage in stages for name, array in stage.gradients.items()}

    results = inprocess.run(ranks, job)
    gradients = {name: array for _, part in results for name, array in part.items()}
    for place, judge in enumerate(judges):
        for name, parameter in judge.named_parameters():
            np.testing.assert_allclose(gradients[f"{place}.{name}"], parameter.grad, rtol=1e-12, atol=1e-14)
    assert all(found == pytest.approx(float(value), rel=1e-12) for found, _ in results)
