"""Steps that really run, recorded by skewed clocks: the parts add up, and what is written can be read."""

import gc
import json
import sys
import time

import numpy as np
import pytest
from support import dense

from mpipipe import Pipeline, nn, optim, schedules, trace, tracing
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess
from mpipipe.job.group import group_of
from mpipipe.tracing.recording import clock_offset
from mpipipe.tracing.records import deliveries
from mpipipe.tracing.segments import PARTS

STEPS, MICROBATCHES = 3, 4


def skewed(rank):
    """A clock that is 50 ms and 100 ppm off for each rank."""
    return lambda: time.perf_counter() * (1 + rank * 100e-6) + rank * 0.050


def recorded(comm, schedule=None, shape=(8, 16)):
    """The Trace of some steps with an optimizer and a norm, on rank 0; None elsewhere."""
    schedule = schedule or schedules.one_f_one_b(comm.size, MICROBATCHES)
    stages = [nn.Stage([nn.Linear(16, 16)], first=number) for number in schedule.stages_of(comm.rank)]
    mine = dense.placed(schedule, comm.rank, *np.ones((2, *shape), np.float32))
    optimizer, scaler = optim.SGD(stages, lr=0.1), optim.LossScaler(1.0)
    with Pipeline(stages, schedule, comm, loss=nn.mean_squared_error) as pipeline:
        pipeline.step(*mine)
        with tracing.recording(pipeline, now=skewed(comm.rank)) as record:
            for _ in range(STEPS):
                pipeline.step(*mine)
                with record.optimizer():
                    optim.scaled_step(optimizer, scaler, 1.0, comm=comm)
        pipeline.step(*mine)  # is not recorded
    return record.trace


def check(found, ranks, error):
    """All that must hold of a trace, whatever the machine did meanwhile; clocks are off by `error` at most."""
    assert sorted(found.parts()) == list(range(ranks))
    for record, steps in zip(found.records, found.parts_of_steps().values()):
        assert len(steps) == STEPS
        for step, parts in zip(record.steps, steps):
            assert sum(parts.values()) == pytest.approx(step.end - step.start, rel=1e-9)
            assert min(parts.values()) >= 0 < parts["compute"]
            assert parts["optimizer"] > 0
            assert [str(action) for action, _, _ in step.actions] == [
                str(action) for action in found.schedule.orders[record.position]
            ]
    messages = deliveries(found.records)
    edges = found.schedule.stages - 1 if ranks > 1 else 0
    assert len(messages) == 2 * edges * MICROBATCHES * STEPS
    assert all(each.sent <= each.received + 2 * error for each in messages)
    assert all(each.nbytes == 2 * 16 * 4 for each in messages)


@pytest.mark.parametrize("chunks", [1, 2])
def test_ranks_of_mpi(comm, chunks, monkeypatch):
    errors = []

    def noted(*arguments):
        offset = clock_offset(*arguments)
        errors.append(offset.error)
        return offset

    monkeypatch.setattr(sys.modules[clock_offset.__module__], "clock_offset", noted)
    name = "one_f_one_b" if chunks == 1 else "interleaved_1f1b"
    found = recorded(comm, dense.build(name, comm.size, chunks, MICROBATCHES))
    assert (found is None) == (comm.rank > 0) and len(errors) == 2
    error = max(group_of(comm).gather("errors of clocks", max(errors)))
    with group_of(comm).raise_together("the checks"):
        if found is not None:
            check(found, comm.size, error)


def test_sums_over_replicas_are_recorded_with_all_of_them(comm):
    schedule = schedules.gpipe(1, 2)
    stage = nn.Stage([nn.Linear(256, 256)])
    alone = comm.Split(comm.rank, 0)
    inputs, targets = np.ones((2, 8, 256), np.float32)
    with Pipeline([stage], schedule, alone, loss=nn.mean_squared_error, replicas=comm) as pipeline:
        with tracing.recording(pipeline, comm) as record:
            pipeline.step(inputs, targets)
    with group_of(comm).raise_together("the checks"):
        if comm.rank == 0:
            assert [each.replica for each in record.trace.records] == list(range(comm.size))
            for parts in record.trace.parts().values():
                assert parts["sums"] > 0 or comm.size == 1
                assert parts["transfer"] == parts["bubble"] == 0
    alone.Free()


def test_recording_is_off_outside_and_needs_a_step():
    def job(comm):
        stage = nn.Stage([nn.Linear(4, 4)], first=comm.rank)
        with Pipeline([stage], schedules.gpipe(2, 2), comm, loss=nn.mean_squared_error) as pipeline:
            with pytest.raises(ArgumentError, match="no step that all ranks have recorded"):
                with tracing.recording(pipeline):
                    pass
            with pytest.raises(RuntimeError):
                with tracing.recording(pipeline):
                    raise RuntimeError("before a step")
            return pipeline.recorder, pipeline.ranks.pipe.context.recorders

    assert inprocess.run(2, job) == [(None, set())] * 2


def test_a_recorded_pipeline_that_nobody_closed_leaves_no_recorder_behind():
    def job(comm):
        pipeline = Pipeline([dense.Identity()], schedules.gpipe(1, 2), comm, loss=nn.mean_squared_error)
        pipeline.record(trace.Recorder())
        recorders = pipeline.ranks.pipe.context.recorders
        assert len(recorders) == 1
        del pipeline
        gc.collect()
        return recorders

    assert inprocess.run(1, job) == [set()]


def test_ranks_of_several_pipelines_that_are_no_replicas_are_refused():
    def job(comm):
        alone = comm.Split(comm.rank, 0)
        pipeline = Pipeline([nn.Stage([nn.Linear(4, 4)])], schedules.gpipe(1, 2), alone, loss=nn.mean_squared_error)
        with pytest.raises(ArgumentError, match="not those of whole pipelines") as refusal:
            with tracing.recording(pipeline, comm):
                pass
        pipeline.close()
        return pipeline.recorder, refusal.value.found

    assert inprocess.run(2, job) == [(None, "2 ranks of 1 pipeline")] * 2


def test_what_is_written_is_read_by_other_tools(tmp_path):
    found = inprocess.run(2, recorded)[0]
    folder = tmp_path / "new" / "trace"
    found.write(folder)
    with pytest.raises(ArgumentError, match="the folder for a trace exists"):
        found.write(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert {int(rank): parts for rank, parts in summary["parts"].items()} == found.parts()
    assert summary["advice"] == found.advice() and tuple(summary["parts"]["0"]) == PARTS
    check_events(json.loads((folder / "trace.json").read_text()), found)


def test_a_trace_of_slices_names_them_and_measures_their_times():
    schedule = schedules.one_f_one_b(2, 2, slices=3)
    found, _ = inprocess.run(2, lambda comm: recorded(comm, schedule, (4, 7, 16)))
    for record in found.records:
        for step in record.steps:
            assert tuple(action for action, _, _ in step.actions) == schedule.orders[record.position]
    assert len(deliveries(found.records)) == 2 * 6 * STEPS
    assert len(found.costs.slices) == 3 and min(found.costs.slices) > 0
    names = [event["name"] for event in found.events() if event["ph"] == "X"]
    assert names.count("1B1.2") == 2 * STEPS  # measured, and predicted


def check_events(events, found):
    """Measured and predicted actions of both ranks, all with a duration, and an arrow for each message."""
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= -1e-6 for event in spans if event["tid"] == 0)
    for rank, order in enumerate(found.schedule.orders):
        names = [str(action) for action in order] * STEPS
        for row, kinds in ((0, {"compute"}), (1, {"F", "B"})):
            rows = [event for event in spans if (event["pid"], event["tid"]) == (rank, row) and event["cat"] in kinds]
            assert [event["name"] for event in rows] == names
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == len(ends) == 2 * MICROBATCHES * STEPS
    assert all(ends[number]["ts"] >= start["ts"] for number, start in starts.items())
