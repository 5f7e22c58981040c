"""The end of a step on a GPU: clipping that the host need not wait for, one launch, and the half copy with it."""

import gc
import math
import weakref
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from support.gradients import OPTIMIZERS, contents, fill, gradient_norm, small_stages, watched

from mpipipe import arrays, nn, optim
from mpipipe.arrays import transfer
from mpipipe.errors import NonFiniteError
from mpipipe.nn.kernels import AdamWNumbers, Update, of
from mpipipe.nn.kernels.cuda.optimizer import clip_factor
from mpipipe.optim.norm import Norm

NUMBERS = dict(b1=0.9, b2=0.95, eps=1e-8, rate=0.01, correction1=0.2, correction2=0.1)


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def test_complex_parameters_are_pairs_of_real_ones(gpu):
    """Norm, clipping and a step on the device, against those on the host."""
    found = []
    for device in ("cpu", "cuda"):
        stage = SimpleNamespace()
        for key in ("parameters", "gradients"):
            buffer = nn.FlatBuffer({"w": (5, 3), "c": (7,)}, "complex64", device)
            host = np.zeros(buffer.flat.size, "complex64")
            host[:15], host[buffer.offsets["c"] :][:7] = np.arange(15) * (1 + 2j), 1j - np.arange(7)
            arrays.copy_into(buffer.flat, arrays.upload(host) if device == "cuda" else host)
            setattr(stage, key, buffer)
        optimizer = optim.AdamW([stage], 0.1)
        assert Norm([stage]).on_device == (device == "cuda")
        norm = optim.clip_by_global_norm([stage], 1.0)
        assert norm == pytest.approx(math.sqrt(5 * sum(n * n for n in range(15)) + 7 + sum(n * n for n in range(7))))
        optimizer.step()
        found.append([norm, *(arrays.download(x.flat) for x in (stage.parameters, stage.gradients))])
    for host, device in zip(*found):
        np.testing.assert_allclose(device, host, rtol=1e-5, atol=1e-6)


# -- the factor


def factor_on_host(squares, max_norm, scale, divisor):
    norm = math.sqrt(math.fsum(squares)) / scale
    return (max_norm / norm if norm > max_norm else 1.0) / divisor


@pytest.mark.parametrize("count", [0, 1, 33, 3000])
@pytest.mark.parametrize("scale, divisor", [(1.0, 1.0), (1024.0, 1024.0), (3.0, 1.0)])
def test_the_factor_has_the_bits_of_an_exact_sum(gpu, count, scale, divisor):
    for seed in range(6):
        generator = np.random.default_rng([seed, count])
        squares = np.exp(generator.uniform(-40, 40, count) * (seed % 3) / 2) * generator.uniform(0.5, 2, count)
        norm = math.sqrt(math.fsum(squares)) / scale
        for max_norm in (norm / 3 or 1.0, 0.7 * norm or 1.0, 2 * norm or 1.0, math.inf):
            found = arrays.download(clip_factor(arrays.upload(squares), max_norm, scale, divisor))
            assert found.shape == () and found.dtype == np.float64
            assert float(found) == factor_on_host(squares, max_norm, scale, divisor)
    for value, places in ((math.inf, 1), (math.nan, 1), (1e308, 41)):
        squares = np.append(np.ones(41 - places), np.full(places, value))
        for max_norm in (0.5, math.inf):
            assert math.isnan(arrays.download(clip_factor(arrays.upload(squares), max_norm, scale, divisor)))


# -- a step


def test_a_norm_that_was_read_holds_nothing_of_its_step(gpu):
    """Norms of many steps may be kept."""
    stages = [nn.Stage([], device="cuda"), *small_stages(device="cuda")]
    norm = optim.scaled_step(optim.AdamW(stages, 0.01), optim.LossScaler(1.0, dynamic=False), 1.0)
    factor = weakref.ref(norm.factor)
    assert factor() is not None
    assert float(norm) == 0.0
    assert factor() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_the_device_has_the_bits_of_one_with_the_norm_on_the_host(gpu, name, dtype):
    before, now = small_stages(dtype, "cuda"), small_stages(dtype, "cuda")
    first, second = OPTIMIZERS[name](before), OPTIMIZERS[name](now)
    scaler = optim.LossScaler(1024.0)
    for stage in now:
        stage.optimizer_writes_compute()
    for step, max_norm in enumerate((5.0, 1e9, 0.1, math.inf)):
        fill(before, step, scaler.scale), fill(now, step, scaler.scale)
        norm = gradient_norm(before, scale=scaler.scale)
        first.step(lr=0.02, scale=(max_norm / norm if norm > max_norm else 1.0) / scaler.scale)
        assert optim.scaled_step(second, scaler, max_norm, lr=0.02) == norm
        for stage in (*before, *now):
            stage.refresh()
        assert contents(now, second) == contents(before, first)
    assert second.steps == first.steps == 4 and scaler.good == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_host_asks_for_the_step_before_it_knows_the_norm(gpu, name, dtype):
    if gpu.real:
        pytest.skip("needs the counters of the emulated device")
    stages = small_stages(dtype, "cuda")
    optimizer = OPTIMIZERS[name](stages)
    waits = watched(optimizer, gpu)
    for stage in stages:
        stage.optimizer_writes_compute()
    gradient_norm(stages)  # uploads its tables once
    fill(stages, 0)
    gpu.reset()
    before = gpu.crossed
    optim.scaled_step(optimizer, optim.LossScaler(1.0), 0.5)
    kernel = {"AdamW": "adamw", "SGD": "sgd", "SGD with momentum": "sgd_momentum"}[name]
    if not gpu.machine.background:  # the host has waited for the norm alone, and the updates are still to come
        underway = [operation.name for queue in gpu.machine.all_queues for operation in queue.operations]
        assert [each for each in underway if each != "free"] == [kernel] * 2 * len(stages)
    assert waits == [[], []] and gpu.synchronisations == ["Event.synchronize"]
    squares = 8 * sum(len(stage.gradients) for stage in stages)
    assert gpu.crossed == {"to_device": before["to_device"], "to_host": before["to_host"] + squares}
    assert all(len(stage.decay_ranges) == 2 for stage in stages)
    assert gpu.launches.count(kernel) == 2 * len(stages)
    for stage in stages:
        stage.refresh()
    assert "strided_copy" not in gpu.launches


def test_an_optimizer_that_raises_leaves_the_memory_of_the_copy_under_way(gpu, monkeypatch):
    """The device still writes to it: what is pinned next has other memory."""
    stages = small_stages(device="cuda")
    fill(stages, 3)
    optimizer = optim.AdamW(stages, 0.01)
    places = []
    pinned = transfer.pinned
    monkeypatch.setattr(transfer, "pinned", lambda nbytes: places.append(pinned(nbytes)) or places[-1])

    def broken(**_):
        raise ValueError("broken on purpose")

    monkeypatch.setattr(optimizer, "step", broken)
    with pytest.raises(ValueError, match="broken on purpose"):
        optim.scaled_step(optimizer, optim.LossScaler(1.0), 1.0)
    place = places[-1].ctypes.data
    places.clear()
    gc.collect()
    assert arrays.pinned(64).ctypes.data != place


@pytest.mark.parametrize("name, value", zip(OPTIMIZERS, (math.inf, -math.inf, math.nan)))
def test_an_overflow_changes_nothing_on_the_device_and_counts_no_step(gpu, name, value):
    stages, others = small_stages("float16", "cuda"), small_stages("float16", "cuda")
    optimizer, undisturbed = OPTIMIZERS[name](stages), OPTIMIZERS[name](others)
    scaler, calm = optim.LossScaler(8.0), optim.LossScaler(8.0)
    for stage in (*stages, *others):
        stage.optimizer_writes_compute()
    fill(stages, 0), fill(others, 0)
    assert optim.scaled_step(optimizer, scaler, 1.0) == optim.scaled_step(undisturbed, calm, 1.0)
    fill(stages, 1, bad=value)
    start = contents(stages, optimizer)
    assert optim.scaled_step(optimizer, scaler, 1.0) is None
    assert contents(stages, optimizer) == start
    assert (scaler.scale, scaler.skipped, optimizer.steps) == (4.0, 1, 1)
    calm.scale = 4.0
    fill(stages, 2), fill(others, 2)
    assert optim.scaled_step(optimizer, scaler, 1.0) == optim.scaled_step(undisturbed, calm, 1.0)
    assert contents(stages, optimizer) == contents(others, undisturbed)
    fixed = optim.LossScaler(4.0, dynamic=False)
    fill(stages, 3, bad=value)
    start = contents(stages, optimizer)
    norm = optim.scaled_step(optimizer, fixed, 1.0)
    with pytest.raises(NonFiniteError, match=r"2\.bias"):
        float(norm)
    assert contents(stages, optimizer) == start
    assert optimizer.steps == 2 and fixed.skipped == 0


# -- the kernels, on the host and on the device

CUTS = {"odd": [0, 7, 64, 65, 190, 203], "many": [*range(0, 203, 16), 203]}


def cut(bounds, first):
    return [(start, stop, (i % 2 == 0) == first) for i, (start, stop) in enumerate(pairwise(bounds))]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype, copy", [("float32", "bfloat16"), ("float32", "float16"), ("float64", "float64")])
@pytest.mark.parametrize("first, cuts", [(True, "odd"), (False, "many")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_is_what_the_update_of_a_piece_leaves_rounded(gpu, name, cuts, first, dtype, copy, device):
    kernels, ranges = of(device), cut(CUTS[cuts], first)
    host = [np.random.default_rng(i).standard_normal(203).astype(dtype) for i in range(3)]
    host[0] *= np.float32(1e5)  # too large for float16 in places
    host += [host[2] ** 2, np.zeros(203, arrays.dtype(copy))]

    def given():
        return [arrays.upload(x) if device == "cuda" else x.copy() for x in host]

    def call(arguments, decays, copy=None):
        p, g, m, v = arguments
        update = Update(0.5, copy)
        if name == "AdamW":
            kernels.adamw(p, g, m, v, AdamWNumbers(**NUMBERS, shrink=0.9 if decays else 1.0), update)
        else:
            u, momentum = (m, 0.9) if name == "SGD with momentum" else (None, 0.0)
            kernels.sgd(p, g, u, momentum, 0.3 if decays else 0.0, 0.1, update)

    *expected, rounded = given()
    for start, stop, decays in ranges:
        call([x[start:stop] for x in expected], decays)
    kernels.copy(expected[0], rounded)
    *found, written = given()
    gpu.reset()
    for start, stop, decays in ranges:
        call([x[start:stop] for x in found], decays, written[start:stop])
    if device == "cuda" and not gpu.real:
        assert len(gpu.launches) == len(ranges)
    assert_equal(arrays.download_all([*found, written]), arrays.download_all([*expected, rounded]))


def test_a_stage_follows_what_users_write_until_they_promise_not_to(gpu):
    (stage,) = small_stages("bfloat16", "cuda", [(37, 13)])
    arrays.set_zero(stage.parameters.flat)
    stage.refresh()
    assert not arrays.download(stage.compute.flat).any() and stage.kept_copy is None
    arrays.upload(np.ones(stage.parameters.flat.size, np.float32), out=stage.parameters.flat)
    stage.optimizer_writes_compute()
    assert (arrays.download(stage.compute.flat) == 1).all() and stage.kept_copy is not None
    (single,) = small_stages("float32", "cuda", [(37, 13)])
    single.optimizer_writes_compute()
    assert single.kept_copy is None
