"""The whole pipeline with stages on a GPU: every way of sending, every precision, and failures."""

from itertools import pairwise

import numpy as np
import pytest
from support import dense
from support.small_gpt import MODEL, build, gradients, on_one_rank, text
from support.tolerance import close, close_norm
from support.training_tolerance import path, roundings

from mpipipe import Mesh, Pipeline, arrays, nn, tracing
from mpipipe.errors import MpipipeError, NonFiniteError
from mpipipe.language.models import GPT
from mpipipe.schedules import gpipe, one_f_one_b

SMALL = dict(layers=3)
MODEL_OF_DEVICES = GPT(**{**MODEL, **SMALL})
OPERATIONS = path(MODEL_OF_DEVICES, 6 * MODEL["seq_len"])
ON_DEVICE = dict(**SMALL, device="cuda")


def near(found, expected, dtype="float64"):
    """Two dicts of gradients, of which one may have been computed in this dtype."""
    half = arrays.is_half(arrays.dtype(dtype))
    for name in found:
        close_norm(found[name], expected[name], roundings(MODEL_OF_DEVICES) if half else OPERATIONS, dtype, name)


@pytest.mark.parametrize("name, chunks", [("one_f_one_b", 1), ("zero_bubble_h1", 1), ("interleaved_1f1b", 2)])
def test_gradients_on_the_device_equal_those_on_the_host(gpu, sending, comm, name, chunks):
    options = dict(rows=6, steps=2, tied=True, dropout=0.25)
    expected, loss = on_one_rank(3, **options, **SMALL)
    found, found_loss = gradients(comm, dense.build(name, comm.size, chunks, 3), **options, **ON_DEVICE)
    close(found_loss, loss, OPERATIONS)
    near(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_low_precision_is_near_double_precision(gpu, comm, dtype, device):
    """Gradients are float32 whatever the activations are, and carry the scale; the result does not."""
    schedule = dense.build("one_f_one_b", comm.size, 1, 3)
    exact, expected = gradients(comm, schedule, 6, **SMALL)
    found, loss = gradients(comm, schedule, 6, dtype=dtype, scale=1024.0, device=device, **SMALL)
    assert all(array.dtype == np.float32 for array in found.values())
    near({key: array / 1024 for key, array in found.items()}, exact, dtype)
    close_norm(loss, expected, roundings(MODEL_OF_DEVICES), dtype, "the loss")


@pytest.mark.mpi(min_size=2)
def test_ranks_of_a_pipeline_on_different_devices_are_refused(gpu, comm):
    stage = nn.Stage([nn.Gelu()], device="cuda" if comm.rank % 2 else "cpu", first=comm.rank)
    with pytest.raises(MpipipeError, match="device of the stages"):
        Pipeline([stage], gpipe(comm.size, 2), comm)


def test_replicas_on_devices_sum_their_gradients(gpu, comm):
    if comm.size % 2:
        pytest.skip("needs an even number of ranks")

    def run(device):
        with Mesh(comm, pipe=comm.size // 2, data=2) as mesh:
            schedule = gpipe(mesh.pipe.size, 2)
            stages = build(schedule, mesh.pipe.rank, "float32", device=device, **SMALL)
            inputs, targets = (part[mesh.data.rank * 2 : mesh.data.rank * 2 + 2] for part in text(4))
            mine = dense.placed(schedule, mesh.pipe.rank, inputs, targets)
            options = dict(loss=nn.softmax_cross_entropy, replicas=mesh.replicas)
            with Pipeline(stages, schedule, mesh.pipe, **options) as pipeline:
                loss = pipeline.step(*mine).loss
            return {name: arrays.download(s.gradients[name]) for s in stages for name in s.gradients}, loss

    (found, loss), (expected, expected_loss) = run("cuda"), run("cpu")
    close(loss, expected_loss, OPERATIONS, dtype="float32")
    near(found, expected, "float32")


def test_durations_and_spans_are_those_of_the_device(gpu, comm):
    """Spans of a rank follow each other, and evaluations are no part of durations."""
    schedule = one_f_one_b(comm.size, 4)
    stages = build(schedule, comm.rank, "float32", **ON_DEVICE)
    mine = dense.placed(schedule, comm.rank, *text(4))
    with Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy) as pipeline:
        with tracing.recording(pipeline) as record:
            for _ in range(2):
                pipeline.step(*mine)
        costs = pipeline.durations()
        assert 0 < pipeline.busy <= pipeline.elapsed and all(value > 0 for value in costs.forward)
        pipeline.evaluate(*mine)
        pipeline.forward(mine[0])
        assert pipeline.durations() == costs
    assert [span.name for span in record.spans] == [str(action) for action in schedule.orders[comm.rank]] * 2
    resolution = 2e-6  # of an event
    for earlier, later in pairwise(record.spans[:8]):
        assert earlier.start < later.start and earlier.end <= later.start + resolution


class Scaled:
    """A user's stage on the device: y = factor * x."""

    device = "cuda"
    gradients = None

    def __init__(self, factor):
        self.factor = factor

    def forward(self, x):
        return nn.kernels.of_array(x).scale(x, self.factor), None

    def backward(self, dy, saved):
        return nn.kernels.of_array(dy).scale(dy, self.factor)


class Same(dense.Identity):
    """On a device."""

    device, factor = "cuda", 1.0


def on_device(schedule, rank, x, target):
    """This rank's part of a batch, uploaded."""
    return [None if part is None else arrays.upload(part) for part in dense.placed(schedule, rank, x, target)]


@pytest.mark.parametrize("stage", [Scaled(2.0), Same()], ids=["its own array", "the received array"])
def test_a_stage_of_the_user_on_device_arrays(gpu, sending, comm, stage):
    schedule = gpipe(comm.size, 6)
    x, target = np.arange(48.0).reshape(12, 4), np.zeros((12, 4))
    mine, factor = on_device(schedule, comm.rank, x, target), stage.factor**comm.size
    with Pipeline([stage], schedule, comm, loss=nn.mean_squared_error) as pipeline:
        for _ in range(2):
            close(pipeline.evaluate(*mine), np.mean((factor * x) ** 2), x.size)
            result, outputs = pipeline.step(*mine, scale=4.0), pipeline.forward(mine[0])
            if outputs is not None:
                np.testing.assert_array_equal(arrays.download(outputs), factor * x)
            if result.input_grads is not None:
                found = np.concatenate([arrays.download(part) for part in result.input_grads])
                close(found, 2 * factor**2 * x / x.size, 4)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_loss_that_is_not_finite_ends_the_step_on_every_rank(gpu, comm, dtype):
    schedule = dense.build("one_f_one_b", comm.size, 1, 2)
    stages = build(schedule, comm.rank, dtype, **ON_DEVICE)
    if comm.rank == comm.size - 1:
        name = list(stages[-1].parameters)[-1]
        arrays.upload(np.full(stages[-1].parameters[name].shape, np.nan, np.float32), out=stages[-1].parameters[name])
    mine = dense.placed(schedule, comm.rank, *text(4))
    pipeline = Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy)
    with pytest.raises(MpipipeError) as caught:
        pipeline.step(*mine)
        pipeline.close()  # on one rank nothing has asked for the loss before
    if comm.rank == comm.size - 1:
        assert isinstance(caught.value, NonFiniteError) and caught.value.microbatch == 0
        assert caught.value.stage == comm.size - 1


def test_a_failure_of_the_device_ends_the_step_on_every_rank(gpu, comm):
    """A kernel that failed leaves all later events undone for ever."""
    if gpu.real or comm.size < 2:
        pytest.skip("a failure cannot be undone on a real device; needs two ranks")

    class Broken(Scaled):
        def forward(self, x):
            if self.factor == 1:
                gpu.machine.put(arrays.stream().queue, "a broken kernel", lambda: 1 / 0)
                self.factor = 2
            return super().forward(x)

    schedule = gpipe(comm.size, 2)
    mine = on_device(schedule, comm.rank, np.ones((4, 2)), np.ones((4, 2)))
    stage = Broken(1.0) if comm.rank == 0 else Scaled(1.0)
    pipeline = Pipeline([stage], schedule, comm, loss=nn.mean_squared_error)
    with pytest.raises((MpipipeError, RuntimeError)):
        pipeline.step(*mine)
    assert bool(gpu.expected_error()) == (comm.rank == 0)


class Undeclared(Scaled):
    device = "cpu"

    def forward(self, x):
        return arrays.upload(np.ones((2, 2))), None


def elsewhere():
    stage = nn.Stage([nn.Gelu()], device="cuda", dtype="float64")
    stage.buffers.gpu = 5
    return [stage]


SQUARES = nn.mean_squared_error
REFUSED = [
    ("different devices", lambda: [nn.Stage([nn.Gelu()], device=device) for device in ("cpu", "cuda")], SQUARES),
    ("not all on its current GPU", elsewhere, SQUARES),
    ("device = 'cuda'", lambda: [Undeclared(1.0)], SQUARES),
    ("value of a loss", lambda: [Scaled(1.0)], lambda output, target: (np.ones(2), output)),
    ("on cpu", lambda: [Scaled(1.0)], lambda output, target: (1.0, np.zeros(output.shape))),
]


@pytest.mark.parametrize("match, make, loss", REFUSED, ids=[match for match, *_ in REFUSED])
def test_stages_and_losses_that_do_not_fit_a_device_are_named(gpu, comm, match, make, loss):
    """The step of these stages ends on every rank, with this report on at least one."""
    stages = make()
    if isinstance(stages[0], Undeclared) and comm.size < 2:
        pytest.skip("needs two ranks")
    schedule = dense.build("looped_bfs", comm.size, len(stages), 2)
    batch = np.ones((4, 2)), np.ones((4, 2))
    mine = (dense.placed if isinstance(stages[0], Undeclared) else on_device)(schedule, comm.rank, *batch)
    with pytest.raises(MpipipeError) as caught:
        Pipeline(stages, schedule, comm, loss=loss).step(*mine)
    texts = comm.allgather(str(caught.value))
    assert any(match in text for text in texts), texts


# -- Buffers that a pipeline on devices uses again while something still reads them -----------------------------------


def test_a_weight_gradient_reads_the_input_that_was_received(gpu, sending, comm):
    dense.check_weight_gradients_from_received_inputs(comm, "cuda")


@pytest.mark.long
@pytest.mark.parametrize(
    "stage, width",
    [(lambda: nn.Stage([nn.Dropout(0.5)], device="cuda"), 600_000), (Same, 16)],
    ids=["dropout-long", "same-short"],
)
def test_a_received_array_that_is_the_output_is_not_received_into(gpu, sending, comm, monkeypatch, stage, width):
    """More micro-batches than receives posted ahead; the long ones are more than 2 MiB, in two chunks."""
    monkeypatch.setenv("MPIPIPE_SYNC_SENDS", "1")
    schedule = gpipe(comm.size, 6)
    x = np.arange(6, dtype=np.float32)[:, None] + np.zeros(width, np.float32)
    feeds = [arrays.upload(x[m : m + 1] + 100 * call) for call in range(2) for m in range(6)]
    with Pipeline([stage()], schedule, comm) as pipeline:
        outputs = [pipeline.forward(part if comm.rank == 0 else None) for part in (feeds[:6], feeds[6:])]
        if comm.rank == comm.size - 1:  # those of the first call were kept during the second
            values = [arrays.download(y) for part in outputs for y in part]
            assert [set(value.reshape(-1)) for value in values] == [
                {m + 100 * call} for call in range(2) for m in range(6)
            ]
