"""Failures and disagreements in a grid of pipe x data: what happens in one pipeline must reach all the others."""

from functools import partial
from time import sleep

import numpy as np
import pytest
from support import dense

from mpipipe import Mesh, Pipeline, nn
from mpipipe.errors import ArgumentError, MismatchError, MpipipeError, NonFiniteError, PeerError, StageError
from mpipipe.job.group import RankGroup
from mpipipe.schedules import gpipe, interleaved_1f1b, one_f_one_b

pytestmark = pytest.mark.mpi(min_size=4)
X, T = np.ones((4, 6), np.float32), np.zeros((4, 6), np.float32)


@pytest.fixture
def mesh(subcomm):
    """pipe 2 x data 2 on the first four ranks; never freed after a failure."""
    comm = subcomm(4)
    if comm is None:
        pytest.skip("only the first four ranks")
    return Mesh(comm, pipe=2)


def stages(mesh, seed=0, width=6):
    return [nn.Stage([nn.Linear(6, width), nn.Linear(width, 6)], first=2 * mesh.pipe.rank, seed=seed)]


def build(mesh, schedule=None, own=None, replicas="mesh", loss=nn.mean_squared_error, **options):
    schedule = schedule or one_f_one_b(2, 2)
    replicas = mesh.replicas if replicas == "mesh" else replicas
    return Pipeline(own or stages(mesh), schedule, mesh.pipe, loss=loss, replicas=replicas, **options)


def everyone_raises(mesh, call, *kinds):
    """`call()` raises one of `kinds` on every rank; returns all texts, in rank order."""
    with pytest.raises(MpipipeError) as caught:
        call()
    assert isinstance(caught.value, kinds), caught.value
    echoes = mesh.comm.allgather(caught.value.reported_elsewhere)
    assert echoes.count(False) >= 1, "somebody reports"
    return mesh.comm.allgather(str(caught.value))


def test_a_rank_without_replicas_reports_though_the_others_have_failed_meanwhile(mesh, monkeypatch):
    """Its partner hears of a failure in the other pipeline, and does not come to close what the two agreed in."""
    close = RankGroup.close
    monkeypatch.setattr(RankGroup, "close", lambda group: sleep(0.5 if mesh.rank == 3 else 0) or close(group))
    replicas = None if mesh.rank == 3 else "mesh"
    texts = everyone_raises(mesh, lambda: build(mesh, replicas=replicas), MismatchError, PeerError)
    assert "without replicas" in texts[3]


@pytest.mark.parametrize(
    "what, match",
    [
        (lambda mesh, odd: dict(own=stages(mesh, seed=int(odd))), "parameters' values"),
        (lambda mesh, odd: dict(own=stages(mesh, width=7 if odd else 6)), "names, shapes"),
        (lambda mesh, odd: dict(own=stages(mesh) * (2 if mesh.rank == 3 else 1)), "wrong number of stages"),
        (lambda mesh, odd: dict(own=stages(mesh)[0] if odd else stages(mesh)), "found: Stage"),
        (lambda mesh, odd: dict(schedule=gpipe(2, 2) if odd else one_f_one_b(2, 2)), "schedule"),
        (lambda mesh, odd: dict(recompute=odd), "recompute"),
    ],
)
def test_replicas_that_are_not_replicas(mesh, what, match):
    options = what(mesh, mesh.data.rank == 1)
    texts = everyone_raises(mesh, lambda: build(mesh, **options), MismatchError, ArgumentError, PeerError)
    assert sum(match in text for text in texts) >= 2


class Bare(dense.Identity):
    """Says nothing of gradients."""


def test_gradients_that_nobody_could_sum_or_that_would_be_summed_twice(mesh):
    texts = everyone_raises(mesh, lambda: build(mesh, own=[Bare()]), ArgumentError)
    assert all("cannot be summed" in text for text in texts)
    Bare.gradients = None
    build(mesh, own=[Bare()]).close()
    texts = everyone_raises(mesh, lambda: build(mesh, interleaved_1f1b(2, 2, 2), stages(mesh) * 2), ArgumentError)
    assert all("would sum twice" in text for text in texts)


@pytest.mark.parametrize("call, where", [("step", "stage"), ("evaluate", "loss")])
def test_a_failure_in_one_pipeline_reaches_the_other(mesh, call, where):
    own, targets = stages(mesh), T * np.nan if where == "loss" and mesh.data.rank else T
    if where == "stage" and mesh.rank == 2:  # stage 1 of the first pipeline
        own[0].forward = lambda x: x / "wet paint"
    pipeline = build(mesh, own=own)
    act = lambda: getattr(pipeline, call)(*dense.placed(pipeline.schedule, mesh.pipe.rank, X, targets))  # noqa: E731
    texts = everyone_raises(mesh, act, StageError, NonFiniteError, PeerError)
    assert all(("forward raised" if where == "stage" else "not finite") in text for text in texts), texts
    with pytest.raises(ArgumentError, match="failed"):
        act()


@pytest.mark.parametrize("name", ["evaluate", "durations", "close"])
@pytest.mark.parametrize("odd", [lambda mesh: mesh.data.rank == 1, lambda mesh: mesh.rank == 1])
def test_ranks_that_call_different_methods_are_told_which(mesh, name, odd):
    pipeline = build(mesh)
    mine = dense.placed(pipeline.schedule, mesh.pipe.rank, X, T)
    call = partial(pipeline.step, *mine)
    if odd(mesh):
        call = partial(getattr(pipeline, name), *(mine if name == "evaluate" else ()))
    texts = everyone_raises(mesh, call, MismatchError)
    assert all(name in text and "step (call 1)" in text for text in texts)
    pipeline.step(*mine)
    pipeline.close()
    mesh.close()


def test_wrong_inputs_in_one_replica_leave_all_of_them_usable(mesh):
    with mesh, build(mesh) as pipeline:
        x, t = dense.placed(pipeline.schedule, mesh.pipe.rank, X, T)
        pipeline.step(x, t)
        before = [stage.gradients.flat.copy() for stage in pipeline.stages]
        short = x[:1] if x is not None and mesh.data.rank else x
        everyone_raises(mesh, lambda: pipeline.step(short, t), ArgumentError)
        for stage, gradients in zip(pipeline.stages, before):
            np.testing.assert_array_equal(stage.gradients.flat, gradients)
        pipeline.step(x, t)
