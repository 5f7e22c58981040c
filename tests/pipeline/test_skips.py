"""Skips: stages that hand data past others give the gradients of the whole network, by every schedule."""

import numpy as np
import pytest
from support import dense, skip_nets
from support.late_messages import late_messages

from mpipipe import Branches, Pipeline, nn, schedules, tracing
from mpipipe.errors import ArgumentError, MismatchError, StageError
from mpipipe.job import inprocess
from mpipipe.schedules import simulate, with_frozen, with_recompute, with_skips
from mpipipe.tracing.records import deliveries

NETS = {  # stages -> skips: side by side, one within the other, crossing, several of one stage
    3: {"near": (0, 2), "again": (0, 2)},
    4: {"outer": (0, 3), "low": (0, 2), "high": (1, 3)},
    8: {"outer": (0, 7), "inner": (1, 6), "short": (2, 4), "wide": (0, 5), "last": (4, 7)},
}
WIDTH = 64  # 128 rows of a micro-batch are 64 kB
CASES = ["one_f_one_b", "interleaved_zero_bubble", "zero_bubble_v"]


def built(name, ranks, microbatches=4):
    """A schedule with skips, or None where it has too few stages on so many ranks."""
    several = name in ("interleaved_1f1b", "interleaved_zero_bubble")
    chunks = {1: 4, 2: 2}.get(ranks, 2) if several else 2 if name == "zero_bubble_v" else 1
    schedule = dense.build(name, ranks, chunks, microbatches)
    return with_skips(schedule, NETS[schedule.stages]) if schedule.stages in NETS else None


def batch(rows, width=WIDTH):
    return np.random.default_rng(rows).normal(size=(2, rows, width))


def run(comm, schedule, inputs, targets, leaves_out=(), **options):
    """(stages, result of the last step, pipeline) on this rank; the first step sends headers, later ones none."""
    stages = skip_nets.model(schedule, comm.rank, inputs.shape[1])
    for stage in stages:
        stage.leaves_out = leaves_out
    own = dense.placed(schedule, comm.rank, inputs, targets)
    with Pipeline(stages, schedule, comm, loss=dense.mean_squared, **options) as pipeline:
        for number in range(3):
            if number == 2:  # all buffers of messages are used again
                pipeline.executor.messages.mailbox.transport.empty = None
            for stage in stages:
                for gradient in stage.gradient_of.values():
                    gradient[...] = 0
            result = pipeline.step(*own)
            ends = [stage.number for stage in stages if stage.ends]
            evaluated, output = pipeline.evaluate(*own), pipeline.forward(own[0])
    first = schedule.trained_from
    ended = (first or not options.get("input_grads", True)) and schedule.placement[first] == comm.rank
    assert ends == ([first] if ended else [])
    assert not any(stage.ends for stage in stages), "the pipeline is closed"
    return stages, result, pipeline, (evaluated, output)


@pytest.mark.parametrize("recomputed, synchronous, asked", [("no", 1, True), ("some", 1, False), ("all", 0, True)])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_whole_network(comm, monkeypatch, name, recomputed, synchronous, asked):
    monkeypatch.setenv("MPIPIPE_SYNC_SENDS", str(synchronous))
    schedule = built(name, comm.size)
    if schedule is None:
        return
    if recomputed == "some":
        least = max(simulate(with_recompute(schedule)).peak_activations)
        schedule = with_recompute(schedule, memory_limit=max(least, max(simulate(schedule).peak_activations) - 1))
    inputs, targets = batch(128 * schedule.microbatches)
    loss, gradients, of_inputs, last = skip_nets.reference(skip_nets.net_of(schedule), Branches(inputs), targets)
    stages, result, pipeline, (evaluated, output) = run(
        comm, schedule, inputs, targets, recompute=recomputed == "all", input_grads=asked
    )
    skip_nets.assert_equal_to(gradients, stages)
    dense.near(result.loss, loss)
    dense.near(evaluated, loss)
    if asked and comm.rank == 0:
        dense.near(np.concatenate(result.input_grads), of_inputs[""])
    if output is not None:
        dense.near(output, last)
    assert pipeline.peak_activations == simulate(schedule).peak_activations[comm.rank]


def test_bytes_go_over_skips_between_ranks_and_over_none_within_one(comm):
    schedule = built("zero_bubble_v", comm.size)
    if schedule is None:
        return
    inputs, targets = batch(16 * schedule.microbatches)
    with Pipeline(skip_nets.model(schedule, comm.rank, WIDTH), schedule, comm, loss=dense.mean_squared) as pipeline:
        pipeline.step(*dense.placed(schedule, comm.rank, inputs, targets))
        found = {key: count for key, count in pipeline.bytes_per_edge.items() if isinstance(key[0], str)}
    expected = {}
    for name, source, target in schedule.skips:
        ends = schedule.placement[source], schedule.placement[target]
        for rank, way in zip(ends, ("forward", "backward")):
            if ends[0] != ends[1] and rank == comm.rank:
                expected[name, way] = inputs.nbytes
    assert found == expected


@pytest.mark.parametrize("ranks, kind, match", [(2, MismatchError, "schedule"), (1, ArgumentError, "skips of the sch")])
def test_ranks_with_other_skips_and_stages_of_layers_alone_are_refused(ranks, kind, match):
    def job(comm):
        schedule = with_skips(schedules.interleaved_1f1b(ranks, 4 // ranks, 3), {"a": (0, 2 + comm.rank)})
        layers = [nn.Stage([nn.Linear(3, 3)], first=number) for number in range(4)]
        given = layers if ranks == 1 else skip_nets.model(schedule, comm.rank, 3)
        with pytest.raises(kind, match=match) as caught:
            Pipeline(given, schedule, comm, loss=dense.mean_squared)
        assert ranks == 2 or ("stage 2" in str(caught.value) and "skip a" in str(caught.value))

    inprocess.run(ranks, job)


FOUND = {
    "missing": (lambda tree: tree.main, "ndarray"),
    "unknown": (lambda tree: Branches(tree.main, **tree.skips, other=tree.main), "Branches with residual, other"),
    "renamed": (lambda tree: Branches(tree.main, residual2=tree["residual"]), "Branches with residual2"),
}


@pytest.mark.parametrize("change", FOUND)
@pytest.mark.parametrize("method, stage", [("forward", 0), ("backward", 3), ("backward_input", 3)])
def test_a_missing_or_unknown_branch_names_its_place(change, method, stage):
    name = "interleaved_1f1b" if method != "backward_input" else "interleaved_zero_bubble"
    schedule = with_skips(dense.build(name, 1, 4, 3), {"residual": (0, 3)})
    (alter, found), (inputs, targets) = FOUND[change], batch(6, 3)

    def job(comm):
        stages = skip_nets.model(schedule, comm.rank, 3)
        before = getattr(stages[stage], method)

        def after(*given):
            found = before(*given)
            return alter(found) if method == "backward" else (alter(found[0]), found[1])

        setattr(stages[stage], method, after)
        with pytest.raises(StageError) as caught, Pipeline(stages, schedule, comm, loss=dense.mean_squared) as pipeline:
            pipeline.step(inputs, targets)
        return caught.value

    (error,) = inprocess.run(1, job)
    assert (error.stage, error.microbatch, error.rank) == (stage, 0, 0)
    assert error.expected == "mpipipe.Branches with residual" and error.found == found


def test_branches_without_a_skip_are_refused():
    def job(comm):
        x = np.ones((2, 3))
        with Pipeline([Through(["residual"])], schedules.gpipe(1, 1), comm, loss=dense.mean_squared) as pipeline:
            pipeline.step(x, x)

    with pytest.raises(StageError, match=r"Branches with residual(.|\n)*no skips"):
        inprocess.run(1, job)


@pytest.mark.parametrize(
    "frozen, leaves_out", [({0}, ["low", "outer"]), ({0, 1}, []), ({0, 1}, ["high"]), ({1}, []), ({3}, [])]
)
def test_no_gradient_goes_over_skips_to_stages_without_a_backward(frozen, leaves_out):
    """The others have the gradients that they have without frozen stages; such a gradient may be left out."""
    plain = with_skips(schedules.interleaved_zero_bubble(2, 2, 3), NETS[4])
    schedule = with_frozen(plain, frozen)
    inputs, targets = batch(6, 3)
    _, gradients, *_ = skip_nets.reference(skip_nets.net_of(plain), Branches(inputs), targets)

    def job(comm):
        stages, _, pipeline, _ = run(comm, schedule, inputs, targets, leaves_out=leaves_out)
        return [stage for stage in stages if stage.number not in frozen], pipeline.plans.training.sends

    for stages, sends in inprocess.run(2, job):
        skip_nets.assert_equal_to(gradients, stages)
        back = [schedule.skips[each.edge - 4].source for each in sends if each.skip and each.direction]
        assert all(schedule.has_backward(stage) for stage in back)


def test_messages_and_traces_name_the_skip():
    schedule = with_skips(schedules.one_f_one_b(3, 2), {"residual": (0, 2)})
    inputs, targets = batch(4, 3)

    def job(comm):
        stages = skip_nets.model(schedule, comm.rank, 3)
        with Pipeline(stages, schedule, comm, loss=dense.mean_squared) as pipeline:
            with tracing.recording(pipeline) as record:
                pipeline.step(*dense.placed(schedule, comm.rank, inputs, targets))
            return record.trace, [envelope.subject for envelope in pipeline.plans.training.receives]

    (trace, _), _, (_, seen) = inprocess.run(3, job)
    over = [f"the activation of micro-batch {m} over {edge}" for m in (0, 1) for edge in ("edge 2", "skip 'residual'")]
    assert seen == over
    names = {each.message for each in deliveries(trace.records)}
    assert {(3, m, way) for m in (0, 1) for way in (0, 1)} <= names
    assert len(names) == 3 * 2 * 2


class Through:
    """Hands on what it gets as it is, so that what it sends lies in buffers that are used again."""

    def __init__(self, gives=(), takes=()):
        self.gives, self.takes = gives, takes

    def forward(self, x):
        main = x.main + sum(x[name] for name in self.takes) if self.takes else x
        return Branches(main, **dict.fromkeys(self.gives, main)) if self.gives else main, None

    def backward(self, dy, saved):
        main = dy.main + sum(dy[name] for name in self.gives) if self.gives else dy
        return Branches(main, **dict.fromkeys(self.takes, main)) if self.takes else main


def test_received_arrays_that_are_handed_on_are_copied():
    """Stage 3 adds x from stage 1 to x, and stage 4 adds x from stage 2 to that."""
    schedule = with_skips(schedules.one_f_one_b(5, 8), {"a": (1, 3), "b": (2, 4)})
    ends = [Through(), Through(["a"]), Through(["b"]), Through(takes=["a"]), Through(takes=["b"])]
    inputs, _ = batch(16, 5)

    def job(comm):
        own = dense.placed(schedule, comm.rank, inputs, np.zeros_like(inputs))
        with Pipeline([ends[comm.rank]], schedule, comm, loss=dense.mean_squared) as pipeline:
            for _ in range(2):
                result, output = pipeline.step(*own), pipeline.forward(own[0])
        return result.input_grads, output

    for seed in range(3):
        with late_messages(seed):
            found = inprocess.run(5, job, synchronous=True)
        np.testing.assert_allclose(found[4][1], 3 * inputs)
        np.testing.assert_allclose(np.concatenate(found[0][0]), 3 * 2 * 3 * inputs / inputs.size)


class Merging(nn.Stage):
    """A subclass that knows Branches."""

    takes_branches = True

    def forward(self, x):
        y, saved = super().forward(x.main + x["a"])
        return y, saved

    def backward(self, dy, saved):
        dx = super().backward(dy, saved)
        return Branches(dx, a=dx)


def test_a_subclass_of_nn_stage_may_know_branches():
    schedule = with_skips(schedules.interleaved_1f1b(1, 3, 2), {"a": (0, 2)})
    inputs, targets = batch(4, 3)

    def job(comm):
        stages = [Through(["a"]), Through(), Merging([nn.Linear(3, 3)], "float64", seed=1)]
        alone = nn.Stage([nn.Linear(3, 3)], "float64", seed=1)
        with Pipeline(stages, schedule, comm, loss=nn.mean_squared_error) as pipeline:
            found = pipeline.step(inputs, targets).loss
        y, saved = alone.forward(2 * inputs)
        expected, dy = nn.mean_squared_error(y, targets)
        alone.backward(dy, saved)
        dense.near(found, expected)
        dense.near(stages[2].gradients.flat, alone.gradients.flat)

    inprocess.run(1, job)
