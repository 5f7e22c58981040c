"""`bench gpu` at sizes that say nothing about speed: each part runs, and its rows mean what they say."""

import json
import math
from inspect import signature

import pytest

from mpipipe import arrays
from mpipipe.bench.gpu import kernels, run, steps
from mpipipe.bench.gpu.run import PARTS
from mpipipe.bench.timing import Row
from mpipipe.job import runtime
from mpipipe.job.exit import Stop
from mpipipe.language.models import GPT

TINY = GPT(vocab=40, dim=16, layers=2, heads=2, seq_len=16, tied=True)


@pytest.fixture
def alone():
    return runtime.mpi().COMM_SELF


def checked(rows, count):
    rows = list(rows)
    assert len(rows) == count and len({row.what for row in rows}) == count
    for row in rows:
        assert math.isfinite(row.value) and row.value >= 0, row
        assert row.ratio is None or row.ratio == row.value / row.peer_value
    return rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_forward_and_backward_of_each_length(gpu, dtype):
    rows = kernels.measure_attention(1, lengths=(48, 130), heads=4, kv_heads=2, head_dim=16, dtype=dtype)
    rows = checked(rows, 4)
    assert ["forward" in row.what for row in rows] == [True, False] * 2
    assert [row.peer for row in rows] == [""] * 4  # what was published is of other sizes


def test_each_kernel_that_memory_bounds_is_measured(gpu):
    rows = checked(kernels.measure_memory(1, rows=16, width=32, vocab=24, parameters=100), 10)
    assert {row.unit for row in rows} == {"GB/s"} and all(row.peer == "copy" for row in rows[1:])


def test_the_executor_is_measured_against_its_own_kernels(gpu, alone):
    (rate,) = checked(steps.measure_executor(3, rows=8, width=16, microbatches=4, comm=alone), 1)
    assert rate.peer_value > 0 and "8 actions" in rate.what


@pytest.mark.long
def test_a_training_step_is_counted_in_tokens(gpu, alone):
    with arrays.own_stream():
        rows = checked(steps.measure_step(1, model=TINY, rows=2, microbatches=2, peers=False, comm=alone), 5)
    untied, tied, small, *others = rows
    assert {row.unit for row in rows} == {"tokens/s"}
    assert [plain.what for plain in others] == [
        f"training step, {what}, without CUDA graphs" for what in ("2 x 2 x 16 tokens", "4 x 1 x 16 tokens")
    ]
    assert ", untied," in untied.what and ", tied," in tied.what and tied.peer_value == untied.value
    assert all("2 x 2 x 16 tokens" in row.what for row in (untied, tied)) and "4 x 1 x 16 tokens" in small.what
    assert small.peer_value == others[0].peer_value == tied.value  # that of the model as it was given
    assert others[1].peer_value == small.value


def test_a_step_that_runs_without_graphs_has_no_row_that_says_graphs(gpu, alone):
    """The null stream records nothing."""
    with arrays.cupy().cuda.Stream.null:
        reason, *rows = steps.measure_step(1, model=TINY, rows=1, microbatches=2, peers=False, comm=alone)
    assert len(rows) == 3 and not any("graphs" in row.what for row in rows)
    assert reason.startswith("CUDA graphs are not measured: ") and "null" in reason


@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_quick_sizes_are_parameters(part):
    assert "repeats" in part.quick and set(part.quick) <= set(signature(part.measure).parameters)


def part_of(*rows):
    """A part of `bench gpu` that gives these rows, or fails without any."""

    def measure(repeats=7):
        if not rows:
            raise RuntimeError("no memory left")
        yield from (Row(name, repeats, "GB/s", "copy", 10.0, "near 1") for name in rows)

    return run.GpuPart(measure, dict(repeats=3))


def test_rows_are_written_as_they_come_and_sizes_may_be_small(gpu, comm, monkeypatch, tmp_path, capsys):
    if comm.size > 1:
        pytest.skip("for one rank")
    path, seen = tmp_path / "bench.json", []

    def watched(repeats=7):
        for row in part_of("one", "two").measure(repeats):
            seen.append([each["what"] for each in json.loads(path.read_text())["rows"]] if path.exists() else None)
            yield row
        print("end of part")
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "PARTS", {"first": run.GpuPart(watched, dict(repeats=3))})
    with pytest.raises(KeyboardInterrupt):
        run.run([], None, path, True, True, comm)
    facts, printed = json.loads(path.read_text()), capsys.readouterr().out.split("end of part")[0]
    assert seen == [None, ["one"]] and [row["what"] for row in facts["rows"]] == ["one", "two"]
    assert facts["rows"][0]["value"] == 3 and facts["quick"]
    assert "one: 3 GB/s; copy 10, ratio 0.300 (near 1)" in printed and "two: 3 GB/s" in printed


def test_a_part_that_fails_is_named_and_the_others_are_reported(gpu, comm, monkeypatch, tmp_path, capsys):
    if comm.size > 1:
        pytest.skip("for one rank")
    parts = {"good": part_of("first", "second"), "bad": part_of(), "last": part_of("third")}
    monkeypatch.setattr(run, "PARTS", parts)
    monkeypatch.setattr(run.processor, "prepare_process", lambda: None)
    assert run.gpu(5, json=tmp_path / "bench.json") == 1
    facts, printed = json.loads((tmp_path / "bench.json").read_text()), capsys.readouterr().out
    assert [row["what"] for row in facts["rows"]] == ["first", "second", "third"]
    assert facts["rows"][0]["ratio"] == 0.5 and facts["versions"]["numpy"] and len(facts["gpus"]) >= 1
    assert facts["failed"] == ["bad failed: RuntimeError: no memory left"]
    assert all(word in printed for word in ("first", "third", "0.500", "near 1", "bad failed: RuntimeError"))


def test_what_it_cannot_measure_is_refused(comm, monkeypatch):
    with pytest.raises(run.ArgumentError, match="no part"):
        run.run(["speed"], None, None, True, False, comm)
    monkeypatch.setattr(run.processor, "prepare_process", lambda: None)
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(Stop, match="2 ranks"):
        run.gpu()
