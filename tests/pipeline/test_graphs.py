"""Stages that run by CUDA graphs: the bits of those that do not, fewer launches, and what cannot be recorded."""

import gc
from collections import Counter

import numpy as np
import pytest
from gpu_emulator import emulated
from support import dense
from support.small_gpt import MODEL, build, parts_of, text

from mpipipe import Pipeline, arrays, nn, optim
from mpipipe.arrays import products
from mpipipe.arrays.graphs import WORKSPACE_BYTES
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, BackendError, MismatchError
from mpipipe.language.models import GPT
from mpipipe.pipeline.graphs import unrecordable
from mpipipe.schedules import Costs, gpipe, looped_bfs, one_f_one_b, peak_memory, simulate, with_recompute

SIZES = dict(
    dim=8, layers=3, heads=2, kv_heads=1, hidden=8, dtype="float32", device="cuda"
)  # 8 parts, for 4 ranks of 2 stages
STEPS = 3  # the first meets actions and records some, the second records what comes once in a step


@pytest.fixture(autouse=True)
def own_stream(request):
    """A test takes the fixture `gpu`, or `emulated_gpu` where it counts or changes what no real GPU shows."""
    request.getfixturevalue("gpu" if "gpu" in request.fixturenames else "emulated_gpu")
    if arrays.is_amd():
        pytest.skip("CuPy records no graphs on AMD's GPUs")
    with arrays.own_stream():
        yield


def train(comm, schedule, monkeypatch, graphs, rows=4, stages=None, recompute=False, between=None, **sizes):
    """(gradients, losses of all steps, what the stages computed with) of a few steps."""
    monkeypatch.setenv("MPIPIPE_GRAPHS", "1" if graphs else "0")
    stages = build(schedule, comm.rank, **SIZES, **sizes) if stages is None else stages
    losses = []
    with Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy, recompute=recompute) as pipeline:
        for step in range(STEPS):
            losses.append(pipeline.step(*dense.placed(schedule, comm.rank, *text(rows, seed=step))).loss)
            losses += (between(pipeline, step) if between is not None else None) or ()
        computes = [stage.runner for stage in pipeline.executor.stages]
    return gradients_of(stages), losses, computes


def gradients_of(stages):
    return {name: arrays.download(s.gradients[name]) for s in stages for name in s.gradients}


def compare(comm, schedule, monkeypatch, with_graphs=None, **options):
    """Train with and without graphs, which has to give the same bits; return what the stages computed with.

    On a real GPU cuBLAS may take another algorithm for its workspace in a recording: there they may differ by rounding.
    `with_graphs` are options of the second training alone.
    """
    options |= dict(comm=comm, schedule=schedule, monkeypatch=monkeypatch)
    expected, losses, _ = train(graphs=False, **options)
    found, same, computes = train(graphs=True, **{**options, **(with_graphs or {})})
    assert agree(same, losses)
    assert found.keys() == expected.keys() and all(agree(found[name], expected[name]) for name in found)
    return computes


def agree(found, expected):
    """Whether numbers have the same bits; on a real GPU, whether they are alike up to rounding in float32."""
    if emulated():
        return found.tobytes() == expected.tobytes() if isinstance(found, np.ndarray) else found == expected
    return np.linalg.norm(np.subtract(found, expected)) <= 1e-4 * np.linalg.norm(expected)


def recorded(computes):
    """The graphs of a stage: how many there are of each action."""
    return Counter(key[0] for kind in computes._free.values() for slot in kind for key in slot.graphs)


@pytest.mark.parametrize(
    "name, chunks, recompute",
    [
        ("one_f_one_b", 1, False),
        ("zero_bubble_h1", 1, True),
        pytest.param("interleaved_1f1b", 2, True, marks=pytest.mark.long),
    ],
)
def test_graphs_give_the_same_bits(gpu, comm, monkeypatch, name, chunks, recompute):
    schedule = dense.build(name, comm.size, chunks, 4)
    computes = compare(comm, schedule, monkeypatch, recompute=recompute, tied=True, frozen=["*.gain"])
    backward = {"backward_input", "backward_weight"} if name == "zero_bubble_h1" else {"backward"}
    for each in computes:
        assert not each.reason  # also where messages are staged and go on while stages compute
        assert set(recorded(each)) >= {"forward", *backward}


@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble_h1"])
def test_adapters_and_frozen_layers_give_the_same_bits_after_steps_of_an_optimizer(gpu, alone, monkeypatch, name):
    """Matrices that an optimizer changes, and what is made of them, are read anew by each launch."""

    def options():
        model = GPT(**{**MODEL, "layers": 2, "dim": 8, "heads": 2, "kv_heads": 1})
        layers = nn.LoRA(2, 4.0, ["q_proj", "down_proj"]).apply(model.build(Local()))
        stage = nn.Stage(layers, seed=3, device="cuda", frozen=["0.*", "*.gain"])
        optimizer = optim.AdamW([stage], 1e-2)
        return dict(stages=[stage], between=lambda pipeline, step: optimizer.step())

    (computes,) = compare(alone, dense.build(name, 1, 1, 2), monkeypatch, options(), **options())
    assert recorded(computes)["forward"]


@pytest.mark.long
@pytest.mark.parametrize("name, chunks", [("one_f_one_b", 1), ("zero_bubble_v", 2)])
def test_a_slot_is_free_until_the_forward_is_run_again(gpu, comm, monkeypatch, name, chunks):
    """Some forwards are run again, ahead of their backwards where costs are uneven; a graph repeats each of them."""
    schedule = dense.build(name, comm.size, chunks, 4)
    costs = Costs(forward=[1 + stage % 3 for stage in range(schedule.stages)])
    least = max(peak_memory(with_recompute(schedule)))
    again = with_recompute(schedule, costs, memory_limit=max(least, max(peak_memory(schedule)) - 1))
    assert comm.size < 3 or again.recomputed
    for each in compare(comm, schedule, monkeypatch, dict(schedule=again)):
        assert not each.reason
        for kind in each._free.values():
            assert len(kind) <= simulate(again).peak_activations[comm.rank] + 1


@pytest.mark.long
def test_more_shapes_than_are_recorded_and_calls_without_backward(gpu, alone, monkeypatch):
    def between(pipeline, step):
        loss = pipeline.step(*dense.placed(schedule, alone.rank, *text(4 * (2 + step), seed=step))).loss
        inputs, targets = dense.placed(schedule, alone.rank, *text(4, seed=9))
        found = pipeline.forward(inputs)
        rest = 0.0 if found is None else float(np.linalg.norm(arrays.download(found)))
        return loss, pipeline.evaluate(inputs, targets), rest

    schedule = one_f_one_b(alone.size, 4)
    monkeypatch.setattr("mpipipe.pipeline.graphs.MOST_KINDS", 2)
    for found in compare(alone, schedule, monkeypatch, rows=4, between=between):
        assert len(found._free) == 2


@pytest.mark.long
def test_tables_that_graphs_use_live_as_long_as_they_do(gpu, alone, monkeypatch):
    """Sequences of many other lengths between two steps take the places of the rotary tables."""

    def between(pipeline, step):
        for stage in stages:
            for length in range(17):
                stage.tables.of(1 << length, 4, 10000.0 + step)
        gc.collect()

    schedule = gpipe(alone.size, 4)
    stages = build(schedule, alone.rank, **SIZES)
    compare(alone, schedule, monkeypatch, dict(stages=stages, between=between))


def test_a_class_says_for_itself_that_it_can_be_recorded(gpu):
    mine, attention = type("Mine", (nn.Linear,), {}), type("MyAttention", (Local,), {})
    stages = [nn.Stage([layer], device="cuda") for layer in (mine(4, 4), nn.SelfAttention(8, 2, attend=attention()))]
    assert unrecordable(stages[0]) == "layer 0 (Mine) does not say that it can be recorded"
    assert unrecordable(stages[1]).endswith("MyAttention does not say that it can be recorded")


class Looks(nn.Layer):
    """Says that it can be recorded, and lets the host wait for the device in one of its methods."""

    recordable = True

    def __init__(self, turn):
        self.turn = turn

    def forward(self, x):
        if self.turn == "forward":
            arrays.download(x)
        return x, None

    def backward_input(self, dy, saved):
        if self.turn == "backward":
            arrays.download(dy)
        return dy, None


class Counts(Looks):
    """Counts its forwards, which a recording would do once."""

    recordable = True
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_a_layer_that_sets_attributes_in_each_forward_is_not_recorded(gpu, alone, monkeypatch):
    layer = Counts("")
    _, (computes,) = regress(alone, gpipe(1, 6), monkeypatch, True, [nn.Stage([layer], device="cuda")], rows=12)
    assert not computes.recorded
    assert layer.calls == STEPS * 6


@pytest.mark.parametrize("turn", ["forward", "backward"])
def test_a_layer_that_waits_for_the_device_ends_recording(emulated_gpu, alone, monkeypatch, caplog, turn):
    """It has said otherwise; the training goes on without graphs, and says why."""
    stages = ([nn.Stage([nn.Linear(12, 16), Looks(turn), nn.Linear(16, 12)], device="cuda")] for _ in range(2))
    expected, _ = regress(alone, gpipe(1, 4), monkeypatch, False, next(stages))
    found, (computes,) = regress(alone, gpipe(1, 4), monkeypatch, True, next(stages))
    assert found == expected
    assert f"the recording of {turn} raised" in computes.reason
    assert computes.reason in caplog.text


def regress(comm, schedule, monkeypatch, graphs, stages, rows=8):
    monkeypatch.setenv("MPIPIPE_GRAPHS", "1" if graphs else "0")
    x = np.random.default_rng(5).normal(size=(rows, 12)).astype(np.float32)
    with Pipeline(stages, schedule, comm, loss=nn.mean_squared_error) as pipeline:
        results = [pipeline.step(*dense.placed(schedule, comm.rank, x + i, -x)) for i in range(STEPS)]
        losses = [(each.loss, [arrays.download(x).tobytes() for x in each.input_grads or ()]) for each in results]
        computes = [stage.runner for stage in pipeline.executor.stages]
    return (losses, {name: array.tobytes() for name, array in gradients_of(stages).items()}), computes


def test_gradients_of_inputs_are_those_of_each_micro_batch(emulated_gpu, comm, monkeypatch):
    """Of all micro-batches at once, after the step: none lies where the next one is computed."""
    schedule = gpipe(comm.size, 4)
    expected, found = (
        regress(comm, schedule, monkeypatch, graphs, [nn.Stage([nn.Linear(12, 12)], first=comm.rank, device="cuda")])
        for graphs in (False, True)
    )
    assert found[0] == expected[0] and not found[1][0].reason


def test_copies_between_host_and_device_cannot_be_recorded(gpu):
    x = arrays.upload(np.ones(3, np.float32))
    for work in (lambda: arrays.upload(np.ones(3)), lambda: arrays.download(x)):
        with pytest.raises(BackendError, match="while a CUDA graph is recorded"):
            arrays.record_graph(work)
    arrays.download(x)


def test_without_cublas_nothing_is_recorded(emulated_gpu):
    """CuPy's own functions of cuBLAS refuse to be recorded, so the library itself is looked for."""
    assert not arrays.graphs_refused()
    products._c_library.cache_clear()
    emulated_gpu.machine.faults.add("cublas")
    assert "cuBLAS cannot be called while a graph is recorded" in arrays.graphs_refused()


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_recorded_products_are_those_of_cublas(gpu, kind):
    """Of matrices, and of many at once, whose strides do not fit into 32 bits of anything but their own parameter."""
    generator = np.random.default_rng(1)
    given = [arrays.upload(generator.normal(size=shape).astype(arrays.dtype(kind))) for shape in [(4, 5), (5, 6)]]
    many = [arrays.upload(generator.normal(size=shape).astype(arrays.dtype(kind))) for shape in [(3, 4, 5), (3, 5, 6)]]
    wide = arrays.accumulator(given[0].dtype)

    def both():
        c, d = arrays.empty((4, 6), wide, "cuda"), arrays.empty((3, 4, 6), wide, "cuda")
        products.gemm(*given, c)
        products.batched_gemm(*many, d, factor=0.5)
        return c, d

    expected = arrays.download(*both())
    graph, found = arrays.record_graph(both)
    for _ in range(2):
        graph.launch()
        assert all(map(agree, arrays.download(*found), expected))
    assert all(map(agree, arrays.download(*both()), expected))


def test_what_cublas_refuses_in_a_recording_is_told(emulated_gpu, monkeypatch):
    x = arrays.zeros((2, 2), "float32", "cuda")
    call = products._call_cublas  # without stream and workspace
    monkeypatch.setattr(products, "_call_cublas", lambda name, *given: "Set" in name or call(name, *given))
    with pytest.raises(BackendError, match="cublasGemmEx has failed"):
        arrays.record_graph(lambda: products.gemm(x, x, x))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("replicas", [False, True])
def test_ranks_and_replicas_with_different_settings_are_told(gpu, comm, monkeypatch, replicas):
    monkeypatch.setenv("MPIPIPE_GRAPHS", "1" if comm.rank == 0 else "0")
    pipe = parts_of(comm, 1 if replicas else comm.size)
    schedule, across = gpipe(pipe.size, 2), comm if replicas else None
    with pytest.raises(MismatchError, match="setting MPIPIPE_GRAPHS"):
        Pipeline([nn.Stage([nn.Linear(4, 4)], device="cuda")], schedule, pipe, nn.mean_squared_error, replicas=across)
    pipe.Free()


@pytest.mark.long
def test_a_closed_pipeline_keeps_no_memory(emulated_gpu, comm, monkeypatch):
    """Though its stages live on, which let messages of the pipeline advance."""
    monkeypatch.setenv("MPIPIPE_GRAPHS", "1")
    machine, alone = emulated_gpu.machine, parts_of(comm, 1)
    stages = build(gpipe(1, 4), 0, **SIZES)
    options = dict(loss=nn.softmax_cross_entropy, replicas=comm)
    with Pipeline(stages, gpipe(1, 4), alone, **options) as pipeline:
        before = machine.used_bytes
        for step in range(STEPS):
            pipeline.step(*text(4, seed=step))
        during = machine.used_bytes
    del pipeline
    gc.collect()
    alone.Free()
    workspace = WORKSPACE_BYTES  # of the stream, which lives on
    assert machine.used_bytes - workspace - before < 0.2 * (during - workspace - before)


def test_graphs_follow_a_parameter_to_another_storage(emulated_gpu, alone, monkeypatch):
    """A later pipeline lets the head share the storage of the embedding; the earlier one goes on evaluating."""

    def losses(graphs):
        monkeypatch.setenv("MPIPIPE_GRAPHS", str(graphs))
        first = nn.Stage([nn.Embedding(32, 8, tie="w")], device="cuda", seed=1)
        second = nn.Stage([nn.LayerNorm(8), nn.Linear(8, 32, bias=False, tie="w")], device="cuda", seed=1, first=1)
        x = np.random.default_rng(1).normal(size=(4, 12, 8)).astype(np.float32)
        ids, targets = text(4)
        earlier = Pipeline([second], gpipe(1, 4), alone, loss=nn.softmax_cross_entropy)
        found = [earlier.evaluate(x, targets) for _ in range(2)]
        with Pipeline([first, second], looped_bfs(1, 2, 4), alone, loss=nn.softmax_cross_entropy) as later:
            optimizer = optim.SGD([first, second], lr=0.5)
            for _ in range(2):
                found.append(later.step(ids, targets).loss)
                optimizer.step()
            found += [earlier.evaluate(x, targets) for _ in range(2)]
            with pytest.raises(ArgumentError, match="a later pipeline lets tied parameters share their storage"):
                earlier.step(x, targets)
        earlier.close()
        return found

    assert losses(1) == losses(0)


def test_a_backward_by_graphs_is_that_of_its_forward(gpu, alone, monkeypatch):
    """Outputs have the shape of what a loss with the head sees: only what the forward did tells them apart."""
    ids, found = np.random.default_rng(2).integers(0, 8, size=(4, 6)), []
    for graphs in "01":
        monkeypatch.setenv("MPIPIPE_GRAPHS", graphs)
        stage = nn.Stage([nn.Embedding(8, 8), nn.Linear(8, 8), nn.Head(8, 8)], seed=1, device="cuda")
        slopes = arrays.upload(np.ones((4, 6, 8), np.float32))
        with Pipeline([stage], gpipe(1, 2), alone, loss=nn.HeadCrossEntropy(stage)) as pipeline:
            for call in "sssfffssff":
                if call == "s":
                    pipeline.step(ids, ids)
                else:
                    pipeline.forward_train(ids)
                    pipeline.backward(slopes)
                found.append(arrays.download(stage.gradients.flat))
    whole = len(found) // 2
    assert all(agree(one, other) for one, other in zip(found[whole:], found))


@pytest.mark.parametrize("change", ["attribute", "weight", "method"])
def test_what_changes_in_a_layer_is_noticed(gpu, alone, monkeypatch, change):
    """Recordings repeat what they have seen."""
    found, calls = [], []
    for graphs in "01":
        monkeypatch.setenv("MPIPIPE_GRAPHS", graphs)
        layers = [nn.Linear(12, 16), nn.RMSNorm(16), nn.Linear(16, 12)]
        stage, x = nn.Stage(layers, seed=1, device="cuda"), np.ones((8, 12), np.float32)
        with Pipeline([stage], gpipe(1, 4), alone, loss=nn.mean_squared_error) as pipeline:
            for step in range(5):
                found.append(pipeline.step(x, -x).loss)
                if step == 2 and change == "attribute":
                    layers[1].eps = 0.5
                elif step == 2 and change == "weight":
                    layers[2].weight = arrays.upload(np.full((12, 16), 0.25, np.float32))
                elif step == 2:
                    forward = layers[0].forward
                    layers[0].forward = lambda x, forward=forward: (calls.append(1), forward(x))[1]
            (computes,) = [stage.runner for stage in pipeline.executor.stages]
    assert agree(found[5:], found[:5]) and (found[4] != found[2] or change == "method")
    if change == "method":
        assert len(calls) == 2 * 2 * 4 and "its forward was replaced" in computes.reason
    else:
        assert recorded(computes)["forward"] > 0


def test_the_null_stream_records_nothing(emulated_gpu, alone, monkeypatch):
    with arrays.cupy().cuda.Stream.null:
        stages = build(gpipe(alone.size, 2), alone.rank, **SIZES)
        for found in compare(alone, gpipe(alone.size, 2), monkeypatch, dict(stages=stages), rows=4):
            assert "null stream" in found.reason


def test_memory_that_runs_out_in_a_recording_is_no_error(emulated_gpu, alone, monkeypatch):
    """Neither for the first time, when the common pool gives back what it keeps, nor for good."""
    record, tried = arrays.record_graph, []

    def without_room(work):
        tried.append(work)
        machine, memory = emulated_gpu.machine, emulated_gpu.machine.memory
        machine.memory = machine.used_bytes + 64
        try:
            return record(work)
        finally:
            machine.memory = memory

    monkeypatch.setattr(arrays, "record_graph", without_room)
    for found in compare(alone, gpipe(alone.size, 4), monkeypatch):
        assert "Out of memory allocating" in found.reason
    assert tried and "MemoryPool.free_all_blocks" in emulated_gpu.synchronisations


def test_what_fails_in_a_recording_is_done_without_it_and_fails_as_ever(gpu, alone, monkeypatch):
    class Fails(Looks):
        """Raises in the forward of one micro-batch."""

        recordable = True

        def forward(self, x):
            if self.stage.position.microbatch == 2:
                raise ArithmeticError("as the test wants it")
            return x, None

    stage = nn.Stage([nn.Linear(12, 12), Fails("")], device="cuda")
    with pytest.raises(Exception, match="as the test wants it"):
        regress(alone, gpipe(1, 4), monkeypatch, True, [stage])
    assert stage.poll is not None
