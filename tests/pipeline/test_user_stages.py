"""Stages of the user's own: what the pipeline gives them, and what it asks of them."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support import dense

from mpipipe import Branches, Mesh, Pipeline, nn, schedules, tracing
from mpipipe.errors import ArgumentError, MismatchError, PeerError, StageError
from mpipipe.job import inprocess
from mpipipe.stages import as_stages


class Wrapped:
    """An nn.Stage behind functions of the user's own."""

    def __init__(self, *layers, dtype="float32"):
        self.inner = nn.Stage(layers, dtype=dtype)
        self.inner_stages = [self.inner]

    def forward(self, x):
        return self.inner.forward(x)

    def backward(self, dy, saved):
        return self.inner.backward(dy, saved)


def alone(job):
    return inprocess.run(1, job)[0]


def test_an_inner_stage_trains_as_the_stage_itself():
    """A linear model in half precision, whose optimizer changes the float32 parameters."""
    plain, wrapped = nn.Stage([nn.Linear(4, 4)], dtype="bfloat16"), Wrapped(nn.Linear(4, 4), dtype="bfloat16")

    def trained(comm, stage, model):
        x = np.ones((8, 4), model.dtype)
        losses = []
        with Pipeline([stage], schedules.gpipe(1, 2), comm, loss=nn.mean_squared_error) as pipeline:
            for _ in range(4):
                losses.append(pipeline.step(x, 0 * x).loss)
                model.parameters.flat -= 0.5 * model.gradients.flat
        return losses

    losses = alone(lambda comm: trained(comm, plain, plain))
    assert losses[-1] < losses[0] / 2
    assert alone(lambda comm: trained(comm, wrapped, wrapped.inner)) == losses
    np.testing.assert_array_equal(wrapped.inner.parameters.flat, plain.parameters.flat)


def test_an_inner_stage_knows_its_position():
    """Dropout draws another mask for each micro-batch while training, and none otherwise."""
    x = np.ones((4, 64), np.float32)

    def job(comm):
        wrapped = Wrapped(nn.Dropout(0.5))
        with Pipeline([wrapped], schedules.gpipe(1, 2), comm, loss=nn.mean_squared_error) as pipeline:
            first, second = pipeline.step(x, np.zeros_like(x)).input_grads
            assert first.any() and not np.array_equal(first, second)
            return pipeline.forward(x)

    np.testing.assert_array_equal(alone(job), x)


def test_inner_stages_are_nn_stages():
    stage = dense.TanhStage(0, 4, 4)
    stage.inner_stages = [nn.Linear(4, 4)]
    with pytest.raises(ArgumentError, match=r"inner_stages of a stage\n.*Linear"):
        as_stages([stage])


def test_a_stage_needs_the_methods_of_its_actions_alone():
    class Forward:
        def forward(self, x):
            return 3 * x, None

    x = np.ones((2, 2))
    assert alone(lambda comm: Pipeline([Forward()], schedules.forward_only(1, 1, 2), comm).forward(x)).sum() == 12
    with pytest.raises(ArgumentError, match=r"Forward without backward\n.*expected: forward, backward"):
        alone(lambda comm: Pipeline([Forward()], schedules.gpipe(1, 2), comm))


def test_what_a_call_leaves_and_what_may_be_asked_within_it():
    """Methods are looked up at each call, spans are there and arrays gone after it, and times may be read within it."""
    stage, calls, x = dense.TanhStage(0, 4, 4), [], np.ones((4, 4))
    forward = stage.forward

    def job(comm):
        loss = lambda output, target: (np.array([0.5]), output)  # noqa: E731  # an array of one number
        with Pipeline([stage], schedules.gpipe(1, 2), comm, loss=loss) as pipeline:
            stage.forward = lambda x: calls.append(pipeline.busy) or forward(x)
            with tracing.recording(pipeline) as record:
                for count in (1, 2):
                    assert pipeline.step(x, x).loss == 0.5
                    assert len(record.spans) == 4 * count and pipeline.executor.call is None
            assert 0 < pipeline.busy < pipeline.elapsed
            costs = pipeline.durations()
            assert len(costs.forward) == 1 and costs.forward[0] > 0 and costs.input_grad[0] > 0
            return record.spans

    assert [span.name for span in alone(job)[:4]] == ["0F0", "0F1", "0B0", "0B1"]
    assert len(calls) == 4


# -- The protocol of a user's stage: what it is told, and what it is asked for -----------------------------------------


class Flat(dense.TanhStage):
    """A tanh layer with flat buffers, which notes what it is told."""

    index = poll = None

    def __init__(self, number, inputs, outputs):
        super().__init__(number, inputs, outputs)
        shapes = {f"{number}.weight": self.weight.shape}
        self.parameters = nn.FlatBuffer(shapes, self.weight.dtype)
        self.parameters[f"{number}.weight"][...] = self.weight
        self.weight = self.parameters[f"{number}.weight"]
        self.gradients = nn.FlatBuffer(shapes, self.weight.dtype)
        self.gradient = self.gradients[f"{number}.weight"]
        self.positions, self.refreshed = [], 0

    def forward(self, x, position):
        self.positions.append(position)
        return super().forward(x)

    def refresh(self):
        self.refreshed += 1


def stages_of(schedule, rank):
    extents = dense.widths(schedule.stages)
    return [Flat(number, *extents[number : number + 2]) for number in schedule.stages_of(rank)]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_is_told_where_the_training_stands(pair, recompute):
    """Each forward has its position, also the one that is made again for its backward."""
    schedule = schedules.interleaved_1f1b(2, 2, 3)
    stages, (x, t) = stages_of(schedule, pair.rank), dense.batch(6, 4)
    own = dense.placed(schedule, pair.rank, x, t)
    with Pipeline(stages, schedule, pair, loss=dense.mean_squared, recompute=recompute) as pipeline:
        assert [stage.index for stage in stages] == [pair.rank, pair.rank + 2]
        assert all(stage.poll is not None for stage in stages)
        for _ in range(2):
            pipeline.step(*own)
        pipeline.evaluate(*own)
        pipeline.forward(own[0])
    for stage in stages:
        trained, rest = stage.positions[: 6 * (1 + recompute)], stage.positions[6 * (1 + recompute) :]
        runs = ("later", "now") if recompute else ("",)
        expected = [nn.Position(step, m, recompute=run) for step in range(2) for m in range(3) for run in runs]
        assert sorted(trained) == expected
        assert [(position.microbatch, position.training) for position in rest] == [(m, False) for m in range(3)] * 2
        assert stage.poll is None and stage.refreshed == 4


def replaced(stage):
    stage.gradients = SimpleNamespace(flat=np.zeros_like(stage.gradients.flat))


def set_to_none(stage):
    stage.gradients = None


def shortened(stage):
    stage.gradients = SimpleNamespace(flat=stage.gradients.flat[:-1])


@pytest.mark.parametrize("change", [replaced, set_to_none, shortened])
def test_gradients_that_were_replaced_are_an_error_on_all_ranks(pair, change):
    """Otherwise they would be summed over the replicas as they were never written, or not at all, without a word."""
    schedule = schedules.one_f_one_b(2, 2)
    (stage,), (x, t) = stages_of(schedule, pair.rank), dense.batch(4, 2)
    own, kept = dense.placed(schedule, pair.rank, x, t), stage.gradients
    with Pipeline([stage], schedule, pair, loss=dense.mean_squared) as pipeline:
        before = pipeline.step(*own).loss
        if pair.rank == 1:
            change(stage)
        with pytest.raises(ArgumentError, match=r"rank 1, stage 1(.|\n)*have been replaced"):
            pipeline.step(*own)
        stage.gradients = kept
        assert pipeline.step(*own).loss == before  # all ranks raised together, so all go on


def in_backward(stage):
    backward = stage.backward
    stage.backward = lambda dy, saved: replaced(stage) or backward(dy, saved)


def in_refresh(stage):
    stage.refresh = lambda: 1 / 0


@pytest.mark.parametrize(
    "change, match",
    [
        (in_backward, "rank 0, stage 0, micro-batch 1(.|\n)*have been replaced"),
        (in_refresh, "rank 0(.|\n)*the start of step raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_failure_of_a_users_stage_names_its_place(pair, change, match):
    schedule = schedules.one_f_one_b(2, 2)
    (stage,), (x, t) = stages_of(schedule, pair.rank), dense.batch(4, 2)
    if pair.rank == 0:
        change(stage)
    with pytest.raises((ArgumentError, StageError, PeerError), match=match):
        with Pipeline([stage], schedule, pair, loss=dense.mean_squared) as pipeline:
            pipeline.step(*dense.placed(schedule, pair.rank, x, t))


class Half(Flat):
    """Buffers in bfloat16, beside what is frozen and known to `state_dict` alone."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.parameters, self.gradients = (nn.FlatBuffer({"weight": (3, 3)}, "bfloat16") for _ in range(2))
        self.frozen = np.zeros((2, 2))

    def state_dict(self):
        return {**self.parameters, "frozen": self.frozen}


def unlike(stage, rank):
    stage.parameters.flat[0] = rank


def unlike_between(stage, rank):
    stage.parameters.flat[-1] = rank  # behind the named ones


def unlike_frozen(stage, rank):
    stage.frozen[...] = rank


def unreadable(stage, rank):
    if rank == 1:
        del stage.frozen


@pytest.mark.parametrize(
    "make, change, kind, match",
    [
        (Half, unlike, MismatchError, "parameters' values"),
        (Flat, unlike_between, MismatchError, "parameters' values"),
        (Half, unlike_frozen, MismatchError, "parameters' values"),
        (Half, unreadable, ArgumentError, r"rank 1.*frozen"),
    ],
)
def test_replicas_of_a_users_stage_start_from_the_same_state(pair, make, change, kind, match):
    with Mesh(pair, pipe=1) as mesh:
        build = partial(Pipeline, schedule=schedules.gpipe(1, 1), comm=mesh.pipe, replicas=mesh.replicas)
        build([make(0, 3, 3)], loss=dense.mean_squared).close()
        stage = make(0, 3, 3)
        change(stage, mesh.rank)
        with pytest.raises(kind, match=match):
            build([stage], loss=dense.mean_squared)


# -- the short way of an action is taken by stages of the user's own, too ----------------------------------------------


class Cut:
    """Hands on the first columns; how many is an attribute."""

    gradients = None
    width = 2

    def __init__(self):
        self.before_write = []

    def forward(self, x):
        return 1.0 * x[:, : self.width], x.shape

    def backward(self, dy, shape):
        dx = np.zeros(shape)
        dx[:, : dy.shape[1]] = dy
        return dx


def cut_pipeline(comm, last):
    loss = lambda y, target: nn.mean_squared_error(y, 0 * y)  # noqa: E731
    return Pipeline([Cut() if comm.rank == 0 else last], schedules.gpipe(2, 2), comm, loss=loss)


def test_a_width_that_depends_on_more_than_shapes_is_refused_also_after_shapes_were_forgotten():
    def job(comm):
        pipeline = cut_pipeline(comm, nn.Stage([nn.Gelu()], "float64"))
        (stage,) = pipeline.stages

        def step(rows, width):
            if comm.rank == 0:
                stage.width = width
            x = np.ones((rows, 3))
            pipeline.step(x if comm.rank == 0 else None, x if comm.rank == 1 else None)

        # the shapes of the first batch are forgotten with the last of 32 others
        for rows, width in [(4, 2), (4, 2), *((6 + 2 * more, 3) for more in range(32)), (4, 3), (4, 3)]:
            step(rows, width)
        with pytest.raises((ArgumentError, PeerError), match="depends on more than the shapes"):
            step(4, 2)

    inprocess.run(2, job)


def test_an_empty_list_of_hooks_is_the_users_own_between_the_halves_of_a_step():
    def job(comm):
        with cut_pipeline(comm, Cut()) as pipeline:
            (stage,) = pipeline.stages
            y = pipeline.forward_train(np.ones((4, 3)) if comm.rank == 0 else None)
            with pytest.raises(ArgumentError, match="between forward_train and its backward"):
                nn.announce_write(stage)
            pipeline.backward(y)
            nn.announce_write(stage)

    inprocess.run(2, job)


def test_branches_without_skips_are_the_main_tree_in_every_step():
    def job(comm):
        stage, x = SimpleNamespace(), np.ones((4, 3))
        stage.forward = lambda x: (Branches(1.0 * x), None)
        stage.backward = lambda dy, saved: Branches(1.0 * dy)
        with Pipeline([stage], schedules.gpipe(2, 2), comm, loss=dense.mean_squared) as pipeline:
            for _ in range(3):
                assert pipeline.step(*dense.placed(pipeline.schedule, comm.rank, x, 0 * x)).loss == 1.0

    inprocess.run(2, job)


def test_a_subclass_of_nn_stage_may_have_more_arrays_in_checkpoints():
    class WithMean(nn.Stage):
        def __init__(self):
            super().__init__([nn.Linear(2, 2)])
            self.mean = np.zeros(2)

        def state_dict(self):
            return {**self.parameters, "mean": self.mean}

        def load_state_dict(self, arrays):
            self.mean = arrays["mean"]

    stage = WithMean()
    assert {*stage.contents} == {"0.weight", "0.bias", "mean"}
    stage.set_contents(lambda name: np.ones(2) if name == "mean" else stage.parameters[name])
    assert stage.mean.tolist() == [1, 1]


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_a_method_that_somebody_puts_on_an_nn_stage_is_called_from_then_on(comm, method):
    """Known shapes let actions pass by the methods of an `nn.Stage`, as long as they are its own."""
    stage, schedule = nn.Stage([nn.Linear(3, 3)], first=comm.rank), schedules.one_f_one_b(comm.size, 4)
    ends = [np.ones((8, 3), np.float32) if comm.rank == rank else None for rank in (0, comm.size - 1)]
    calls = []

    def counted(*arguments):
        calls.append(method)
        return getattr(nn.Stage, method)(stage, *arguments)

    with Pipeline([stage], schedule, comm, loss=nn.mean_squared_error) as pipeline:
        for _ in range(3):
            pipeline.step(*ends)
        setattr(stage, method, counted)
        pipeline.step(*ends)
        delattr(stage, method)
        pipeline.step(*ends)
    assert calls == [method] * 4
