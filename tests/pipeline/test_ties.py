"""Tied parameters: one array on each rank, sums of gradients where they are, and the same bits wherever places lie."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_emulator.fixture import own_gpus
from support import dense, small_gpt
from support.small_gpt import MODEL, parts_of, text
from support.tolerance import close_norm

from mpipipe import Mesh, Pipeline, arrays, nn, optim
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, PeerError
from mpipipe.pipeline.ties import TiedParameter
from mpipipe.schedules import gpipe, looped_bfs, one_f_one_b

HEAD = f"{1 + 2 * MODEL['layers']}.1.weight"


TWO_CHUNKS = looped_bfs(1, 2, 3)
build = partial(small_gpt.build, dtype="float32", tied=True)


def trained(comm, schedule, steps=3, before=True, **options):
    """({name: parameter}, norms) after some steps of AdamW, which is made before or after the pipeline."""
    stages = build(schedule, comm.rank, **options)
    mine = dense.placed(schedule, comm.rank, *text(6))
    optimizer = optim.AdamW(stages, lr=1e-2) if before else None
    norms = []
    with Pipeline(stages, schedule, comm, loss=nn.softmax_cross_entropy) as pipeline:
        optimizer = optimizer or optim.AdamW(stages, lr=1e-2)
        for _ in range(steps):
            pipeline.step(*mine)
            norms.append(optim.clip_by_global_norm(stages, 0.5, comm))
            optimizer.step()
    return {name: arrays.download(stage.parameters[name]) for stage in stages for name in stage.parameters}, norms


@pytest.mark.parametrize("schedule", [gpipe(1, 3), TWO_CHUNKS])
def test_places_on_one_rank_share_one_array(alone, schedule):
    stages = build(schedule, 0)
    size = sum(stage.parameters.flat.size for stage in stages)
    first, last = stages[0], stages[-1]
    layer = last.layers[-1].layers[1]
    with Pipeline(stages, schedule, alone, loss=nn.softmax_cross_entropy):
        assert last.parameters[HEAD] is first.parameters["0.weight"] is layer.weight
        assert last.gradients[HEAD] is first.gradients["0.weight"]
        assert layer.weight_grad is last.gradients[HEAD]
        flats = [stage.parameters.flat for stage in stages]
        assert sum(flat.size for flat in flats) == size - MODEL["vocab"] * MODEL["dim"]
        for stage in stages:
            ends = [stop for _, stop, _ in stage.decay_ranges]
            assert ends[-1] == stage.parameters.flat.size
    assert last.tied_copies == {HEAD} and (first is last or not first.tied_copies)


@pytest.mark.parametrize("before", [False, True])
def test_training_gives_the_same_bits_with_one_array_and_with_many(comm, before):
    """Alone the optimizer sees one array; on several ranks each of two has its own, with its own state."""
    alone = parts_of(comm, 1)
    expected, norms = trained(alone, gpipe(1, 3), before=before)
    chunked, chunked_norms = trained(alone, TWO_CHUNKS, before=before)
    alone.Free()
    found, found_norms = trained(comm, dense.build("one_f_one_b", comm.size, 1, 3), before=before)
    assert norms == chunked_norms == found_norms
    assert expected[HEAD].tobytes() == expected["0.weight"].tobytes()
    for others in (chunked, found):
        assert {name: array.tobytes() for name, array in others.items()} == {
            name: expected[name].tobytes() for name in others
        }


def test_a_stage_whose_parameter_lies_in_an_absent_one_is_refused_with_what_helps(alone):
    tied = lambda first: nn.Stage([nn.Linear(4, 4, bias=False, tie="w")], "float64", 1, first=first)  # noqa: E731
    one, two = tied(0), tied(1)
    Pipeline([one, two], looped_bfs(1, 2, 1), alone, loss=nn.mean_squared_error).close()
    one.parameters.flat[...] += 1
    x = np.random.default_rng(0).standard_normal((2, 4))
    with pytest.raises(ArgumentError, match="weight lies in the buffer of a stage of an earlier") as caught:
        Pipeline([two], gpipe(1, 1), alone, loss=nn.mean_squared_error)
    assert "(there number 0, where it is 0.weight)" in caught.value.found
    assert "new.parameters[name][...] = old.parameters[name]" in caught.value.remedy
    new = tied(1)
    for name in new.parameters:
        new.parameters[name][...] = two.parameters[name]
    with Pipeline([new], gpipe(1, 1), alone, loss=nn.mean_squared_error) as pipeline:
        assert (pipeline.forward(x) == two.forward(x)[0]).all()
        assert pipeline.step(x, x).loss > 0 and new.gradients.flat.any()
    Pipeline([one, two], looped_bfs(1, 2, 1), alone, loss=nn.mean_squared_error).close()


def test_a_second_pipeline_with_the_stages_in_another_order_trains_them(alone):
    """The storage stays where the first pipeline has put it; nothing else depends on the order."""
    x = np.random.default_rng(0).standard_normal((2, 4))
    found = []
    for first in (False, True):
        one, two = (nn.Stage([nn.Linear(4, 4, bias=False, tie="w")], dtype="float64", seed=1, first=n) for n in (0, 1))
        if first:
            Pipeline([one, two], looped_bfs(1, 2, 1), alone, loss=nn.mean_squared_error).close()
        stages = [two, one]
        with Pipeline(stages, looped_bfs(1, 2, 1), alone, loss=nn.mean_squared_error) as pipeline:
            optimizer = optim.SGD(stages, lr=0.1)
            for _ in range(2):
                pipeline.step(x, 2 * x)
                norm = optim.clip_by_global_norm(stages, 1e9, alone)
                optimizer.step()
        found.append((norm, two.parameters["1.weight"].tobytes(), one.parameters["0.weight"].tobytes()))
    assert found[0] == found[1] and norm > 0 and found[0][1] == found[0][2]


def test_a_backward_by_hand_adds_the_parts_of_all_places_to_the_one_gradient(alone):
    x = np.random.default_rng(0).standard_normal((2, 4))

    def by_hand(stage):
        stage.gradients.flat[...] = 0
        y, saved = stage.forward(x)
        stage.backward(np.ones_like(y), saved)
        return {name: array.copy() for name, array in stage.gradients.items()}

    layers = [nn.Linear(4, 4, bias=False, tie="w") for _ in range(2)]
    stage = nn.Stage(layers, dtype="float64", seed=1)
    apart = by_hand(stage)
    with Pipeline([stage], gpipe(1, 1), alone, loss=nn.mean_squared_error) as pipeline:
        for _ in range(2):
            pipeline.step(x, x)
            expected = apart["0.weight"] + apart["1.weight"]
            for gradient in by_hand(stage).values():
                assert np.abs(gradient - expected).max() <= 4 * np.finfo(np.float64).eps * np.abs(expected).max()


def test_stages_of_two_dtypes_keep_an_array_each(alone):
    """Both have parameters of float32, but no array of both bfloat16 and float32 can be computed with."""
    layers = [nn.Linear(8, 8, bias=False, tie="w"), nn.Linear(8, 8, bias=False, tie="w")]
    given = [nn.Stage([layer], dtype, seed=1, first=i) for i, (layer, dtype) in
             enumerate(zip(layers, ("float32", "bfloat16")))]  # fmt: skip

    class Narrowed:
        """The second stage, between float32 activations."""

        inner_stages = given[1:]

        def forward(self, x):
            y, saved = given[1].forward(x.astype(given[1].dtype))
            return y.astype(np.float32), saved

        def backward(self, dy, saved):
            return given[1].backward(dy.astype(given[1].dtype), saved).astype(np.float32)

    x, t = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
    with Pipeline([given[0], Narrowed()], dense.build("looped_bfs", 1, 2, 3), alone, nn.mean_squared_error) as pipeline:
        pipeline.step(x, t)
    one, other = given[0].gradients["0.weight"], given[1].gradients["1.weight"]
    assert not given[1].owners and not np.shares_memory(one, other) and one.tobytes() == other.tobytes() and one.any()


def test_places_of_different_shape_are_refused_as_they_are(alone):
    stage = nn.Stage([nn.Linear(8, 6, bias=False, tie="w"), nn.Linear(6, 8, bias=False, tie="w")])
    with pytest.raises(MismatchError, match="tied parameters 'w' differ"):
        Pipeline([stage], gpipe(1, 2), alone, loss=nn.mean_squared_error)
    assert not stage.owners


class Around:
    """A stage around another, whose gradients it shows as the array that they were in before any pipeline."""

    def __init__(self, inner):
        self.inner_stages = [inner]
        self.gradients = SimpleNamespace(flat=inner.gradients.flat)
        self.forward, self.backward = inner.forward, inner.backward


def hiding(inner):
    """A stage around another, which shows no gradients of its own."""
    return SimpleNamespace(inner_stages=[inner], forward=inner.forward, backward=inner.backward)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("chunks", [1, 2], ids=["one stage", "two chunks"])
def test_replicas_sum_a_part_once_that_lies_in_an_array_of_the_users(comm, chunks):
    """A second sum of the same memory would multiply the part by the number of replicas."""
    x, found = np.random.default_rng(comm.rank).standard_normal((2, 4)), []
    schedule = dense.build("looped_bfs", 1, chunks, 1)
    for wrap in (lambda stage: stage, Around, hiding):
        layers = [nn.Linear(4, 4, bias=False, tie="w"), nn.Linear(4, 4, bias=False, tie="w")]
        given = [nn.Stage(layers[cut::chunks], dtype="float64", seed=1, first=cut) for cut in range(chunks)]
        with Mesh(comm, pipe=1, data=comm.size) as mesh:
            stages = [wrap(stage) for stage in given]
            with Pipeline(stages, schedule, mesh.pipe, nn.mean_squared_error, replicas=mesh.replicas) as pipeline:
                for _ in range(2):
                    pipeline.step(x, 2 * x)
        found.append(given[0].gradients["0.weight"])
    for other in found[1:]:
        close_norm(other, found[0], 100, "float64", "the sum")
    assert np.abs(found[0]).max() > 0.01


# -- A rank that ends while gradients of a tied parameter are under way: the job ends, and says so once ----------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device, guilty", [("cpu", "first"), ("cuda", "last")])
def test_an_error_in_mid_exchange_reaches_all_ranks(comm, monkeypatch, device, guilty):
    """Those that wait for a part hear of it, and so do those without a place, which are in their next step by then."""
    monkeypatch.setenv("MPIPIPE_TIMEOUT", "60")  # a rank that does not hear is to be an error
    guilty, places = (0 if guilty == "first" else comm.size - 1), (0, 1, comm.size - 1)
    start, broken = TiedParameter._start, False

    def breaks(parameter, *given):
        if broken and comm.rank == guilty:
            raise ValueError("wet paint")
        return start(parameter, *given)

    monkeypatch.setattr(TiedParameter, "_start", breaks)
    schedule, x = one_f_one_b(comm.size, 4), np.ones((8, 512), np.float32)
    with own_gpus(comm.rank) if device == "cuda" else nullcontext():
        tied = dict(bias=False, tie="w") if comm.rank in places else {}
        stage = nn.Stage([nn.Linear(512, 512, **tied)], first=comm.rank, device=device)
        pipeline = Pipeline([stage], schedule, comm, loss=nn.mean_squared_error)
        mine = dense.placed(schedule, comm.rank, x, x)
        for _ in range(2):
            pipeline.step(*mine)
        broken = True
        with pytest.raises((ValueError, MpipipeError), match="wet paint") as caught:
            for _ in range(2 - (comm.rank in places)):
                pipeline.step(*mine)
        assert comm.rank == guilty or isinstance(caught.value, PeerError)
