"""Forwards that are run again: the bits of those that are not, what is held meanwhile, and where a failure is."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from support import dense
from support.small_gpt import gradients, on_one_rank, shared_out

from mpipipe import Pipeline, nn, schedules, tracing
from mpipipe.errors import StageError
from mpipipe.job import inprocess
from mpipipe.schedules import Costs, from_csv, one_f_one_b, simulate, with_recompute

CASES = [  # schedule, chunks, memory limit as a share of its peak; None: all are run again
    ("one_f_one_b", 1, 0.75),
    ("interleaved_zero_bubble", 2, 0.8),
    ("zero_bubble_v", 2, 0.9),
    ("v_half", 2, None),
]
UNEVEN = [1, 3, 2, 1, 2]


def recomputed(name, ranks, chunks, microbatches, share):
    """A schedule with R's, some of them away from their backwards where costs are uneven."""
    schedule = dense.build(name, ranks, chunks, microbatches)
    costs = Costs(forward=[UNEVEN[stage % 5] for stage in range(schedule.stages)])
    if share is None:
        return with_recompute(schedule, costs)
    least = max(schedules.peak_memory(with_recompute(schedule)))
    return with_recompute(schedule, costs, max(least, share * max(schedules.peak_memory(schedule))))


@pytest.mark.parametrize("name, chunks, share", CASES)
def test_gradients_have_the_bits_of_1f1b_on_1_2_and_4_ranks(comm, name, chunks, share):
    options = dict(rows=6, steps=2, dropout=0.25, tied=True, dtype="float32")
    expected, loss = on_one_rank(5, **options)
    for _, (_, ranks, _), group in shared_out(comm, [(name, ranks, chunks) for ranks in (1, 2, 4)]):
        schedule = recomputed(name, ranks, chunks, 5, share)
        assert ranks == 1 or schedule.recomputed
        found, found_loss = gradients(group, schedule, **options)
        assert found_loss == loss
        for key, gradient in found.items():
            assert gradient.tobytes() == expected[key].tobytes(), (name, ranks, key)


class Saved(SimpleNamespace):
    """What a forward saves; other than SimpleNamespace it can be watched."""


class Counted(nn.Stage):
    """Notes at each of its calls what its forwards have saved and nobody has dropped yet."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.alive, self.seen = 0, []

    def gone(self):
        self.alive -= 1

    def forward(self, x):
        self.seen.append(("forward", self.alive))
        y, saved = super().forward(x)
        kept = Saved(saved=saved)
        weakref.finalize(kept, self.gone)
        self.alive += 1
        return y, kept

    def backward(self, dy, kept):
        self.seen.append(("backward", self.alive))
        return super().backward(dy, kept.saved)


def seen_by(schedule, **options):
    """What a stage of one rank sees in a step: which call, and how many saved activations there are."""

    def job(comm):
        stage = Counted([nn.Linear(4, 4)])
        x = np.ones((3, 4), np.float32)
        with Pipeline([stage], schedule, comm, loss=nn.mean_squared_error, **options) as pipeline:
            pipeline.step(x, x)
            return stage.seen, pipeline.peak_activations

    return inprocess.run(1, job)[0]


def test_nothing_but_the_input_is_held_until_the_forward_is_run_again():
    seen, peak = seen_by(from_csv("0F0,0F1,0F2,0R1,0R2,0B0,0B1,0B2"))
    kinds = ["forward"] * 5 + ["backward"] * 3
    assert seen == list(zip(kinds, [0, 1, 1, 1, 2, 3, 2, 1])) and peak == 3


def test_recompute_is_a_schedule_with_an_r_before_each_backward():
    given, peak = seen_by(schedules.gpipe(1, 3), recompute=True)
    written, whole = seen_by(from_csv("0F0,0F1,0F2,0R0,0B0,0R1,0B1,0R2,0B2"))
    assert given == written and (peak, whole) == (3, 1)  # the schedule that was handed in holds 3
    assert simulate(schedules.gpipe(1, 3)).peak_activations == [3]
    mixed, _ = seen_by(from_csv("0F0,0F1,0F2,0R2,0B0,0B1,0B2"), recompute=True)
    assert [kind for kind, _ in mixed] == [*["forward"] * 5, "backward", "forward", "backward", "backward"]


@pytest.mark.parametrize("recompute", [False, True])
def test_durations_and_traces_know_recomputations(recompute):
    """An R counts as a forward, or, where the user's schedule knows none, as a part of the backward."""
    plain = one_f_one_b(2, 4)
    shown = with_recompute(plain)

    def job(comm):
        stage = nn.Stage([nn.Linear(4, 4)], first=comm.rank)
        x, schedule = np.ones((4, 4), np.float32), plain if recompute else shown
        with Pipeline([stage], schedule, comm, loss=nn.mean_squared_error, recompute=recompute) as pipeline:
            with tracing.recording(pipeline) as record:
                pipeline.step(*dense.placed(schedule, comm.rank, x, x))
            clock = pipeline.executor.clock
            spent = [(action.op, seconds) for action, seconds in zip(clock.actions, clock.seconds)]
            return pipeline.durations(), spent, [span.name for span in record.spans]

    for rank, (costs, spent, names) in enumerate(inprocess.run(2, job)):
        assert names == [str(action) for action in shown.orders[rank]]
        assert sorted(op for op, _ in spent) == [*"BBBBFFFFRRRR"]
        seconds = {op: sum(took for kind, took in spent if kind == op) for op in "FRB"}
        expected = (seconds["F"] / 4, (seconds["B"] + seconds["R"]) / 4)
        if not recompute:
            expected = (seconds["F"] + seconds["R"]) / 8, seconds["B"] / 4
        assert (costs.forward[rank], costs.input_grad[rank]) == pytest.approx(expected, rel=1e-12)


def test_a_failure_and_an_account_name_the_recomputation():
    def job(comm):
        stage, calls, found = nn.Stage([nn.Linear(4, 4)]), iter(range(100)), []
        forward = stage.forward
        with pytest.raises(StageError) as caught:
            with Pipeline([stage], with_recompute(schedules.gpipe(1, 2)), comm, nn.mean_squared_error) as pipeline:

                def breaks(x):
                    found.append(pipeline.state.snapshot())
                    if next(calls) == 3:
                        raise ValueError("wet paint")
                    return forward(x)

                stage.forward = breaks
                pipeline.step(np.ones((4, 4), np.float32), np.ones((4, 4), np.float32))
        return caught.value, found

    ((error, accounts),) = inprocess.run(1, job)
    assert str(error).startswith("rank 0, stage 0, micro-batch 1: recomputation raised ValueError: wet paint")
    assert accounts[2].doing.startswith("recomputation of stage 0, micro-batch 0, in step") and accounts[2].computes
