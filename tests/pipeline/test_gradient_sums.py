"""Sums of gradients that start as the layers of a stage end: same bits, early, and no deadlock.

NCCL is emulated. With `one queue` the emulated device runs nothing before all that was issued earlier has begun.
"""

import time
from functools import partial

import numpy as np
import pytest
from gpu_emulator.fixture import own_gpus
from hypothesis import given
from hypothesis import strategies as some
from support import dense
from support.device_pipelines import all_aborted
from support.small_gpt import MODEL, build, text

from mpipipe import Mesh, Pipeline, arrays, nn
from mpipipe.comm.nccl import sums
from mpipipe.comm.transport.staged import StagedTransport
from mpipipe.errors import MpipipeError, StageError
from mpipipe.pipeline.gradient_sums import Bucket, GradientSums, cut
from mpipipe.schedules import from_csv, gpipe, one_f_one_b
from mpipipe.train import Shard

SMALL = dict(layers=3, device="cuda", dtype="float32")
pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(sums, "BUCKET_BYTES", 2000)


@pytest.fixture
def mesh(own, comm):
    """All ranks are replicas of pipelines of one rank."""
    return Mesh(comm, pipe=1, data=comm.size)


def pipeline_of(mesh, schedule, stages, recompute=False):
    loss = nn.softmax_cross_entropy
    return Pipeline(stages, schedule, mesh.pipe, loss=loss, replicas=mesh.replicas, recompute=recompute)


def rows_of(mesh, schedule, rows=4):
    """This rank's share of a batch: each replica has rows of its own."""
    part = slice(rows * mesh.data.rank, rows * (mesh.data.rank + 1))
    return dense.placed(schedule, mesh.pipe.rank, *(each[part] for each in text(mesh.shape.data * rows)))


def gradients(stages):
    return [arrays.download(stage.gradients.flat).tobytes() for stage in stages]


def by_layers(pipeline):
    return [pipeline.executor.sums.by_layers(chunk) is not None for chunk in range(len(pipeline.stages))]


def run(mesh, schedule, steps=2, rows=4, recompute=False, **options):
    """The gradients of each step, and the losses."""
    stages = build(schedule, mesh.pipe.rank, **{**SMALL, **options})
    mine, found = rows_of(mesh, schedule, rows), []
    with pipeline_of(mesh, schedule, stages, recompute) as pipeline:
        for _ in range(steps):
            loss = pipeline.step(*mine).loss
            found.append((gradients(stages), loss))
        early = by_layers(pipeline)
    return found, early


CASES = {
    "1F1B": ("one_f_one_b", 1, {}),
    "tied": ("one_f_one_b", 1, dict(tied=True)),
    "tied over two chunks": ("looped_bfs", 2, dict(tied=True)),
    "two chunks": ("interleaved_1f1b", 2, dict(dtype="float64")),
    "split backward": ("zero_bubble_h1", 1, dict(dtype="bfloat16")),
    "recompute": ("gpipe", 1, dict(recompute=True, dropout=0.25)),
}


@pytest.mark.long
def test_weights_correct_what_was_summed_by_layers(mesh):
    """Each replica has a weight of its own; on the host the sums begin when a stage has ended."""
    schedule = dense.build("zero_bubble_h1", mesh.pipe.size, 1, 4)

    def weighted(output, target, factor):
        return (*nn.softmax_cross_entropy(output, target, factor), 3.0 + 4 * mesh.data.rank)

    found = {}
    for device in ("cpu", "cuda"):
        stages = build(schedule, mesh.pipe.rank, layers=3, device=device, tied=True)
        with Pipeline(stages, schedule, mesh.pipe, loss=weighted, replicas=mesh.replicas) as pipeline:
            losses = [pipeline.step(*rows_of(mesh, schedule)).loss for _ in range(2)]
            assert by_layers(pipeline) == [device == "cuda"] * len(stages)
        found[device] = [*losses, *(arrays.download(stage.gradients.flat) for stage in stages)]
    for one, other in zip(*found.values()):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("own, case", [(number % 2, case) for number, case in enumerate(CASES)], indirect=["own"])
def test_sums_by_layers_have_the_bits_of_sums_at_the_end(mesh, monkeypatch, case):
    name, chunks, options = CASES[case]
    schedule = dense.build(name, mesh.pipe.size, chunks, 4)
    with monkeypatch.context() as patch:
        patch.setattr(GradientSums, "by_layers", lambda self, chunk: None)
        expected, early = run(mesh, schedule, **options)
        assert not any(early)
    found, early = run(mesh, schedule, **options)
    assert all(early)
    assert found == expected


def test_a_gradient_that_no_layer_has_written_counts_as_zero(mesh, monkeypatch):
    """With one micro-batch the memory still holds the gradient of the step before."""
    stage = nn.Stage([nn.Linear(3, 40), nn.Linear(40, 60), nn.Linear(60, 3)], seed=1, device="cuda")
    skipping, x = stage.layers[2], np.ones((4, 3), np.float32)
    with Pipeline([stage], gpipe(1, 1), mesh.pipe, loss=nn.mean_squared_error, replicas=mesh.replicas) as pipeline:
        assert by_layers(pipeline) == [True]
        pipeline.step(x, 0 * x)
        assert arrays.download(stage.gradients["2.weight"]).any()
        given = skipping.backward_input
        monkeypatch.setattr(skipping, "backward", lambda dy, saved: given(dy, saved)[0])
        pipeline.step(x, 0 * x)
    assert not arrays.download(stage.gradients["2.weight"]).any()
    assert arrays.download(stage.gradients["1.weight"]).any()


def mark(monkeypatch, machine, stage, method):
    """Note in the log of launches when the backward of each layer begins."""

    def marked(name, original, *arguments):
        machine.launches.append(name)
        return original(*arguments)

    for place, layer in enumerate(stage.layers):
        monkeypatch.setattr(layer, method, partial(marked, f"layer {place}", getattr(layer, method)))


@pytest.mark.long
@pytest.mark.parametrize("own", [True], indirect=True)
@pytest.mark.parametrize("name, method", [("one_f_one_b", "backward"), ("zero_bubble_h1", "backward_weight")])
def test_buckets_are_put_while_earlier_layers_are_still_to_come(own, mesh, monkeypatch, name, method):
    schedule = dense.build(name, mesh.pipe.size, 1, 4)
    (stage,) = build(schedule, mesh.pipe.rank, **SMALL)
    mine = rows_of(mesh, schedule)
    with pipeline_of(mesh, schedule, [stage]) as pipeline:
        pipeline.step(*mine)  # in which NCCL connects ranks for each size of a bucket
        plan = pipeline.executor.sums.by_layers(0)
        mark(monkeypatch, own.machine, stage, method)
        own.machine.launches.clear()
        pipeline.step(*mine)
        log = [each for each in own.machine.launches if each.startswith(("layer", "ncclAllReduce"))]
    ends = len(log) - log[::-1].index(f"layer {len(stage.layers) - 1}") - 1  # where the last backward begins
    assert not any(each.startswith("nccl") for each in log[:ends])
    put, seen = 0, {}
    for each in log[ends:]:
        if each.startswith("layer"):
            seen[int(each.split()[1])] = put
        put += each.startswith("nccl")
    assert seen == {at: sum(bucket.place > at for bucket in plan.buckets) for at in range(len(stage.layers))}
    assert seen[0] > 0 and put == len(plan.buckets) > seen[0]


# -- stages whose sums start at the end --------------------------------------------------------------------------------


class Other(nn.Stage):
    """A stage that may do more in its backward than its layers do."""


class Scaled(nn.Layer):
    """A layer of the user's."""

    def __init__(self, dim):
        self.declared = {"scale": nn.Parameter((dim,), lambda generator, shape: np.ones(shape))}

    def forward(self, x):
        return self.stage.kernels.add(x, x), None

    def backward_input(self, dy, saved):
        return self.stage.kernels.add(dy, dy), None


def launched_behind(own, mesh, monkeypatch, pipeline, stage, batch):
    """Whether all sums of a step are put behind the last layer's backward."""
    pipeline.step(*batch)
    with monkeypatch.context() as patch:
        mark(patch, own.machine, stage, "backward")
        own.machine.launches.clear()
        pipeline.step(*batch)
    log = [each.split()[0] for each in own.machine.launches if each.startswith(("layer", "ncclAllReduce"))]
    return "ncclAllReduce" in log and log.index("ncclAllReduce") > len(log) - log[::-1].index("layer") - 1


@pytest.mark.long
@pytest.mark.parametrize("own", [False], indirect=True)
@pytest.mark.parametrize(
    "which", ["a class of the user's", "on one replica", "a layer of the user's", "a user's stage"]
)
def test_what_is_not_known_keeps_its_sums_for_the_end(own, mesh, monkeypatch, which):
    schedule = one_f_one_b(mesh.pipe.size, 2)
    batch = rows_of(mesh, schedule, 2)
    if which == "a layer of the user's":
        stages = [nn.Stage([nn.Linear(3, 30), Scaled(30), nn.Linear(30, 3)], device="cuda")]
        batch = [np.ones((4, 3), np.float32)] * 2
        made = Pipeline(stages, schedule, mesh.pipe, loss=nn.mean_squared_error, replicas=mesh.replicas)
    else:
        other = which == "a class of the user's" or (which == "on one replica" and mesh.data.rank == 1)
        stages = build(schedule, mesh.pipe.rank, kind=Other if other else nn.Stage, **SMALL)
        given = [User(stage) for stage in stages] if which == "a user's stage" else stages
        made = pipeline_of(mesh, schedule, given)
    with made as pipeline:
        assert not any(by_layers(pipeline))
        assert launched_behind(own, mesh, monkeypatch, pipeline, stages[0], batch)


class User:
    """A stage of the user's around an nn.Stage."""

    def __init__(self, stage):
        self.inner_stages, self.forward, self.backward = [stage], stage.forward, stage.backward


# -- rings and failures ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("own", [True], indirect=True)
def test_rings_of_attention_between_the_ranks_of_a_sum(own, comm, monkeypatch):
    """Layers that are still to come exchange messages with the ranks for which buckets on the device wait."""
    with Mesh(comm, pipe=1, seq=comm.size) as mesh:
        shard = Shard(mesh.seq)
        options = dict(attend=shard.attend(MODEL["seq"], causal=True), token_positions=shard.positions(MODEL["seq"]))

        def steps():
            stages = build(gpipe(1, 2), 0, **options, **SMALL)
            batch = [shard.part(each) for each in text(2)]
            with pipeline_of(mesh, gpipe(1, 2), stages) as pipeline:
                for _ in range(2):
                    loss = pipeline.step(*batch).loss
                return gradients(stages), loss, by_layers(pipeline)

        with monkeypatch.context() as patch:
            patch.setattr(GradientSums, "by_layers", lambda self, chunk: None)
            *expected, early = steps()
            assert early == [False]
        *found, early = steps()
    assert early == [True] and found == expected


@pytest.mark.long
@pytest.mark.parametrize("guilty", ["first", "last"])
def test_a_layer_that_raises_behind_a_bucket_ends_all_ranks(own, mesh, comm, monkeypatch, guilty):
    """The bucket's kernel waits on the other replica, or this one's does, and nobody will come."""
    schedule = one_f_one_b(mesh.pipe.size, 2)
    (stage,) = build(schedule, mesh.pipe.rank, **SMALL)
    mine = rows_of(mesh, schedule)
    pipeline = pipeline_of(mesh, schedule, [stage])
    for _ in range(2):
        pipeline.step(*mine)
    broken = comm.rank == (0 if guilty == "first" else comm.size - 1)
    if broken:
        before = len(stage.layers) // 2
        calls, original = [], stage.layers[before].backward

        def backward(dy, saved):
            calls.append(len(pipeline.executor.sums.underway))
            if len(calls) == 2:
                raise ValueError("broken on purpose")
            return original(dy, saved)

        monkeypatch.setattr(stage.layers[before], "backward", backward)
    with pytest.raises(StageError if broken else MpipipeError, match="broken on purpose"):
        pipeline.step(*mine)
    if broken:
        assert calls[0] == 0 and calls[1] > 0, "buckets were under way"
    all_aborted(own.machine)
    stage.backward(*_fresh(stage))  # outside of the pipeline nobody hears of its layers


def _fresh(stage):
    """(gradient of the output, what a forward saved) of a stage."""
    first = isinstance(stage.layers[0], nn.Embedding)
    x = text(1)[0] if first else arrays.upload(np.ones((1, MODEL["seq"], MODEL["dim"]), np.float32))
    y, saved = stage.forward(x)
    return arrays.upload(np.ones(y.shape, np.float32)), saved


# -- messages ----------------------------------------------------------------------------------------------------------


CROSSING = """0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,3W1,0I1,0W0,0W1
1F0,2F0,1F1,2F1,2I0,1I0,2I1,2W0,2W1,1I1,1W0,1W1
"""  # gradients cross, each followed by the last weight gradient of a stage


class Slow(nn.Layer):
    """Takes half a second for one input gradient, in which messages go on."""

    def __init__(self, microbatch):
        self.microbatch = microbatch

    def forward(self, x):
        return x, self.stage.position.microbatch

    def backward_input(self, dy, saved):
        end = time.monotonic() + 0.5 * (saved == self.microbatch)
        while time.monotonic() < end:
            self.stage.poll()
            time.sleep(1e-3)
        return dy, None


@pytest.mark.long
@pytest.mark.mpi(min_size=4)
def test_sums_wait_for_messages_that_the_host_moves(comm, subcomm, monkeypatch):
    """Later pieces of a staged message would stand behind a sum, and that waits for the replica that waits for them."""
    four = subcomm(4)
    if four is None:
        return
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "20")
    monkeypatch.setenv("MPIPIPE_GPU_DIRECT", "0")
    monkeypatch.setattr(StagedTransport, "piece_bytes", 64)
    x = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    with own_gpus(four.rank, one_queue=True), arrays.own_stream(), Mesh(four, pipe=2, data=2) as mesh:
        schedule = from_csv(CROSSING)
        slow = {(0, 0): (3, 1), (1, 1): (1, 0)}.get((mesh.data.rank, mesh.pipe.rank), (None, None))
        stages = []
        for number in schedule.stages_of(mesh.pipe.rank):
            layers = [nn.Linear(32, 32), Slow(slow[1] if slow[0] == number else None)]
            stages.append(nn.Stage(layers, device="cuda", first=2 * number, seed=1))
        mine = dense.placed(schedule, mesh.pipe.rank, x, -x)
        with Pipeline(stages, schedule, mesh.pipe, loss=nn.mean_squared_error, replicas=mesh.replicas) as pipeline:
            assert pipeline.ranks.nccl.sums
            losses = {pipeline.step(*mine).loss for _ in range(2)}
    assert len(losses) == 1


# -- Buckets of gradients: every element once, in the order in which layers end, cut at the edges of layers ------------


CUTS = {  # (arrays, count): their buckets
    "a layer that fills a bucket has one of its own": (
        [[(60, 0), (150, 1), (240, 2), (330, 3)]],
        100,
        [(0, 240, 330, 3), (0, 150, 240, 2), (0, 60, 150, 1), (0, 0, 60, 0)],
    ),
    "small layers share a bucket and large ones have several": (
        [[(1000, 0), (1010, 1), (1020, 2), (1250, 3)]],
        100,
        [(0, 1150, 1250, 3), (0, 1050, 1150, 3), (0, 1000, 1050, 1)]
        + [(0, start, start + 100, 0) for start in range(900, -1, -100)],
    ),
    "what holds pieces of all layers stands apart": (  # gains; and a part of a tied parameter
        [[(40, 0), (80, 1), (120, 2), (121, 0), (122, 1), (123, 2)], [(30, 2)]],
        40,
        [(0, 80, 120, 2), (1, 0, 30, 2), (0, 40, 80, 1), (0, 120, 123, 0), (0, 0, 40, 0)],
    ),
    "nothing is no bucket": ([[]], 10, []),
}


@pytest.mark.parametrize("arrays, count, expected", CUTS.values(), ids=CUTS)
def test_buckets_by_hand(arrays, count, expected):
    assert cut(arrays, count) == [Bucket(*bucket) for bucket in expected]


PIECES = some.lists(some.tuples(some.integers(1, 50), some.integers(0, 5)), max_size=20)


@given(some.lists(PIECES, max_size=3), some.integers(1, 60))
def test_buckets_hold_every_element_once_and_wait_for_all_its_writers(arrays, count):
    given, writers = [], []
    for pieces in arrays:
        writers.append([place for size, place in pieces for _ in range(size)])
        stops = [sum(size for size, _ in pieces[: at + 1]) for at in range(len(pieces))]
        given.append([(stop, place) for stop, (_, place) in zip(stops, pieces)])
    found = cut(given, count)
    covered = sorted((bucket.array, at) for bucket in found for at in range(bucket.start, bucket.stop))
    assert covered == [(array, at) for array, places in enumerate(writers) for at in range(len(places))]
    for bucket in found:
        assert 0 < bucket.stop - bucket.start <= count
        assert bucket.place == min(writers[bucket.array][bucket.start : bucket.stop])
    places = [bucket.place for bucket in found]
    assert places == sorted(places, reverse=True)
