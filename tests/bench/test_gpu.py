"""`bench gpu` at sizes that say nothing about speed: each part runs, and its rows mean what they say."""

from __future__ import annotations

import ast
import json
import math
import os
import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gpu_emulator import cublaslt
from support import gpu_selection
from support.command_line import invoke
from support.reference_attention import NAMES, dense
from support.tolerance import close, within

from mpipipe import arrays
from mpipipe.arrays import products
from mpipipe.bench import timing
from mpipipe.bench.gpu import kernels, run, steps
from mpipipe.bench.gpu.run import PARTS
from mpipipe.bench.timing import Row, show_rows
from mpipipe.job import inprocess, runtime, settings
from mpipipe.language.models import GPT

TESTS = Path(__file__).parents[1]

TINY = GPT(vocab=40, dim=16, layers=2, heads=2, seq=16, tied=True)


def checked(rows, count):
    rows = list(rows)
    assert len(rows) == count and len({row.what for row in rows}) == count
    for row in rows:
        assert math.isfinite(row.value) and (row.value >= 0 or "idle" in row.what), row
        assert row.ratio is None or row.ratio == row.value / row.peer_value
    return rows


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_forward_and_backward_of_each_length(gpu, dtype):
    rows = kernels.measure_attention(1, lengths=(48, 130), heads=4, kv_heads=2, head_dim=16, dtype=dtype, peers=False)
    rows = checked(rows, 4)
    assert ["forward" in row.what for row in rows] == [True, False] * 2
    assert [row.peer for row in rows] == [""] * 4  # what was published is of other sizes


def test_published_rates_stand_beside_their_own_sizes_only(gpu, monkeypatch):
    monkeypatch.setattr(kernels, "_whole", lambda *_: [])
    monkeypatch.setattr(kernels, "_alone", lambda *_: (1e-3, 2e-3))
    beside = [row for row in kernels.measure_attention(1, lengths=(8192, 4000), peers=False)]
    assert [row.peer_value for row in beside] == [644, 541, None, None]
    close(beside[0].value, 4 * 8192**2 / 2 * 64 * 128 / 1e-3 / 1e12, 8)
    close(beside[1].value, 2.5 * beside[0].value / 2, 8)
    other = [row for row in kernels.measure_attention(1, lengths=(8192,), head_dim=64, peers=False)]
    assert [row.peer_value for row in other] == [None, None]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_virtual_ring_computes_what_one_kernel_does(gpu, dtype):
    ranks, length = 4, 8
    checked(kernels.measure_ring(1, ranks, length, heads=4, kv_heads=2, head_dim=16, dtype=dtype), 3)
    whole = [timing.normal((1, ranks * length, n, 16), dtype, seed) for seed, n in enumerate((4, 2, 2, 4))]
    layout = kernels.attention.Layout("zigzag", ranks, ranks * length)
    host = [arrays.download(x).astype("float64") for x in whole]
    ordered = [layout.unshard([x[:, r * length : (r + 1) * length] for r in range(ranks)]) for x in host]
    expected = dense(*ordered)
    bounds = dict(zip(NAMES, expected.bounds(dtype)))
    sums = [0.0, 0.0]  # a rank's are over all blocks, those of all ranks over all keys
    for number in range(ranks):
        rank = kernels._VirtualRank(number, ranks, length, whole)
        for _ in range(2):  # a second turn finds the sums of the first in its buffers
            rank.forward()
            dq, *others = rank.backward()
        sums = [total + arrays.download(x).astype("float64") for total, x in zip(sums, others)]
        for name, found, want in (("out", rank.out, expected[0]), ("dq", dq, expected[2])):
            within(arrays.download(found), layout.shard(want, number), layout.shard(bounds[name], number), name)
    for name, found, want in zip(("dk", "dv"), sums, expected[3:]):
        mine, allowed = (sum(layout.shard(x, number) for number in range(ranks)) for x in (want, bounds[name]))
        within(found, mine, allowed, name)


def test_the_virtual_ring_runs_what_the_ring_runs(gpu, monkeypatch):
    """Each block of each rank goes through the functions that attention.Ring calls, and no others."""
    from mpipipe.attention.kernels import cupy as kernel

    whole = [timing.normal((1, 24, n, 8), "float32", seed) for seed, n in enumerate((2, 1, 1, 2))]
    virtual, calls = [kernels._VirtualRank(number, 3, 8, whole) for number in range(3)], []

    def spy(module, name):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, **named: calls.append((name, *named.values())) or real(*given, **named)
        )

    for name in ("make_accumulator", "block_gradients"):
        spy(kernel, name)
    for module in (kernels, arrays):
        spy(module, "cast")
    spy(arrays, "strided_copy")
    for rank in virtual:
        rank.forward()
        rank.backward()
    ours = sorted(calls)
    calls.clear()

    def real(comm):
        attend = kernels.attention.Ring(comm, layout="zigzag")
        q, k, v, dout = (x[:, comm.rank * 8 : (comm.rank + 1) * 8] for x in whole)
        attend.backward(dout, attend.forward(q, k, v)[1])

    inprocess.run(3, real)
    assert virtual[0].kernel is kernel and sorted(calls) == ours


def test_each_kernel_that_memory_bounds_is_measured(gpu):
    rows = checked(kernels.measure_memory(1, rows=16, width=32, vocab=24, parameters=100), 14)
    assert {row.unit for row in rows} == {"GB/s"} and all(row.peer == "copy" for row in rows[1:])


def test_the_executor_is_measured_against_its_own_kernels(gpu):
    rate, idle = checked(steps.measure_executor(3, rows=8, width=16, microbatches=4), 2)
    assert rate.peer_value > 0 and idle.value < 100 and "8 actions" in idle.what


def test_the_kernels_that_count_as_busy_are_those_of_a_step(gpu, monkeypatch):
    """The bare loop launches what the pipeline's actions do; else the idle share is of something else."""
    if gpu.real:
        pytest.skip("needs the counters of the emulated device")
    loops, launched = [], []

    def behind(work, call, repeats):
        gpu.reset()
        call()
        loops.append(list(gpu.launches))
        return 3.0, True

    class Spied(steps.Pipeline):
        def step(self, *given):
            run = self.engine.executor.run

            def counted(*arguments):
                gpu.reset()
                outcome = run(*arguments)
                launched.append(list(gpu.launches))
                return outcome

            self.engine.executor.run = counted
            result = super().step(*given)
            self.engine.executor.run = run
            self.engine.executor.clock.settle()
            self.engine.executor.clock.span = 4.0
            return result

    monkeypatch.setattr(steps, "seconds_behind", behind)
    monkeypatch.setattr(steps, "Pipeline", Spied)
    _, idle = steps.measure_executor(3, rows=8, width=16, microbatches=4)
    close(idle.value, 25, 8)
    assert len(loops) == 3 and "at least" not in idle.what
    assert sorted(loops[0]) == sorted(name for name in launched[-1] if name in set(loops[0]))
    others = [name for name in launched[-1] if name not in set(loops[0])]
    assert others == ["memcpyAsync"] * 4, "of the losses, which go home behind the last of them"


def test_work_in_front_gets_the_host_ahead(gpu, monkeypatch):
    """More of it where the device came to the measured call too early; told where that does not help."""
    done, worked = iter([True, False, True, True, True, True, True]), []
    monkeypatch.setattr(timing.arrays, "is_done", lambda event: next(done))
    x = timing.normal((64,), "float32")
    y = arrays.empty_like(x)
    monkeypatch.setattr(timing, "seconds", lambda call, repeats: 1.0)
    work = lambda: worked.append(arrays.copy_into(y, x))  # noqa: E731
    _, always = timing.seconds_behind(work, lambda: arrays.copy_into(x, y), 1)
    assert always and len(worked) == 2 + 4
    worked.clear()
    assert not timing.seconds_behind(work, lambda: arrays.copy_into(x, y), 1)[1]
    assert len(worked) == 2 + 4 + 8 + 16 + 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", [(0,), (3, 5), (7, 11), (64,), (1000,)])
def test_random_values_fill_an_array_of_any_length(gpu, monkeypatch, shape, dtype):
    monkeypatch.setattr(timing, "BLOCK", 64)
    values = arrays.download(timing.normal(shape, dtype, 3))
    assert values.shape == shape and values.dtype == arrays.dtype(dtype)
    flat = values.reshape(-1).astype("float64")
    assert (flat == [flat[n % 64] for n in range(flat.size)]).all() and len(set(flat[:64])) == len(flat[:64])
    assert flat.size < 10 or not (flat == arrays.download(timing.normal(shape, dtype, 4)).reshape(-1)).all()


@pytest.mark.long
def test_a_training_step_is_counted_in_tokens(gpu):
    with arrays.own_stream():
        rows = checked(steps.measure_step(1, model=TINY, rows=2, microbatches=2, peers=False), 5)
    untied, tied, small, *others = rows
    assert {row.unit for row in rows} == {"tokens/s"}
    assert [plain.what for plain in others] == [
        f"training step, {what}, without CUDA graphs" for what in ("2 x 2 x 16 tokens", "4 x 1 x 16 tokens")
    ]
    assert ", untied," in untied.what and ", tied," in tied.what and tied.peer_value == untied.value
    assert all("2 x 2 x 16 tokens" in row.what for row in (untied, tied)) and "4 x 1 x 16 tokens" in small.what
    assert small.peer_value == others[0].peer_value == tied.value  # that of the model as it was given
    assert others[1].peer_value == small.value


def test_a_step_that_runs_without_graphs_has_no_row_that_says_graphs(gpu):
    """The null stream records nothing."""
    with arrays.cupy().cuda.Stream.null:
        reason, *rows = steps.measure_step(1, model=TINY, rows=1, microbatches=2, peers=False)
    assert len(rows) == 3 and not any("graphs" in row.what for row in rows)
    assert reason.startswith("CUDA graphs are not measured: ") and "null" in reason


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_measured_step_ends_as_that_of_a_training(emulated_gpu, monkeypatch, tied):
    """One kernel updates the parameters and their copy; no pass clips the gradients or casts the parameters."""
    model, tokens = replace(TINY, tied=tied), np.zeros((2, 2, TINY.seq), np.int64)

    def launches(step, synchronize, repeats):
        step()
        synchronize()
        emulated_gpu.reset()
        step()
        return list(emulated_gpu.launches)

    monkeypatch.setattr(steps, "_wall", launches)
    with arrays.own_stream():
        found = steps._step_seconds(1, model, tokens, 1, "bfloat16", None, True)
    assert sum(name.startswith("graph of") for name in found) == 2  # forward and backward
    for dtype in ("bfloat16", "float16"):
        found = steps._step_seconds(1, model, tokens, 1, dtype, None, False)
        assert found.count("adamw") == 1 and found.count("clip_factor") == 1, found
        assert not {"cast", "rescale"} & set(found) and found.index("clip_factor") < found.index("adamw")


def test_our_own_rows_come_before_a_peer_is_loaded(gpu, monkeypatch):
    monkeypatch.setattr(kernels, "_whole", lambda *_: [])
    monkeypatch.setattr(kernels, "_alone", lambda *_: (1e-3, 2e-3))
    monkeypatch.setattr(steps, "_step_seconds", lambda *_: 1e-3)
    known = {
        kernels: (kernels.measure_attention, ("cuDNN on H200, published",)),
        steps: (steps.measure_step, ("untied", "1 x 8 x 1024 tokens", "with them")),
    }
    for module, (measure, peers) in known.items():
        monkeypatch.setattr(module, "torch_with_gpu", lambda: pytest.fail("too early"))
        measured = measure(1)
        assert all(next(measured).peer in ("", *peers) for _ in range(4))


def test_ties_and_sizes_of_the_measured_steps(gpu, monkeypatch):
    """What is called tied is tied; small micro-batches hold the same tokens."""
    asked = []
    monkeypatch.setattr(
        steps,
        "_step_seconds",
        lambda repeats, model, tokens, count, *_: asked.append((model.tied, tokens.shape, count, _[-1])) or 1.0,
    )
    list(steps.measure_step(1, peers=False))
    sizes = [each[:3] for each in asked]
    whole, pieces = ((2, 8, 1024), 1), ((2, 16, 512), 16)
    assert sizes == [(False, *whole), (True, *whole), (True, *pieces), (True, *whole), (True, *pieces)]
    assert [each[3] for each in asked] == [True, True, True, False, False]


def test_what_pytorch_compiles_is_measured_last():
    pytest.importorskip("torch")
    from mpipipe.bench.torch_gpt import PEERS

    assert [compiled for _, compiled in PEERS.values()] == [False, False, True]


@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_quick_sizes_are_parameters(part):
    assert "repeats" in part.quick and set(part.quick) <= set(signature(part.measure).parameters)


@pytest.mark.long
def test_the_parts_with_a_pipeline_run_without_mpi(gpu, monkeypatch):
    monkeypatch.setattr(runtime, "mpi", lambda: pytest.fail("asked for MPI"))
    _, row, *_ = inprocess.run(1, lambda comm: list(steps.measure_step(1, TINY, 2, 2, peers=False, comm=comm)))[0]
    rate, _ = inprocess.run(1, lambda comm: list(steps.measure_executor(1, 8, 16, 2, comm=comm)))[0]
    assert row.value > 0 and rate.value > 0


@pytest.mark.long
@pytest.mark.parametrize("job", ["", "2"])
def test_a_process_without_mpi_measures_alone_unless_it_is_one_of_several(monkeypatch, capsys, job):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for name in settings.SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_SIZE", job)
    calls = []
    monkeypatch.setattr(run, "run", lambda *given: calls.append(given))
    outcome = invoke("bench", "gpu", "--quick", "--no-peers", "--part", "memory")
    if job:
        assert outcome.code == 1 and not calls
    else:
        assert outcome.code == 0, outcome
        assert calls[0][:5] == (["memory"], None, None, False, True) and calls[0][5].size == 1


def test_a_process_without_mpi_refuses_a_part_as_every_command_refuses(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for name in settings.SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    outcome = invoke("bench", "gpu", "--part", "nonsense")
    assert outcome.code == 2 and "mpipipe: stopped:\n  ArgumentError: no part of bench gpu" in outcome.report


def test_messages_between_two_ranks_on_one_gpu(gpu, subcomm):
    comm = subcomm(2)
    if comm is not None:
        rows = list(steps.measure_transport(1, sizes=(256, 1 << 16), comm=comm))
        staged = [row.what for row in rows if row.what.startswith("staged")]
        assert [what.split(",")[1] for what in staged] == [" 256 B", " 65536 B"] and all(row.value > 0 for row in rows)
        assert not (gpu.real and arrays.device_count() > 1) == all("take turns" in row.what for row in rows)


def test_rates_are_claimed_only_where_each_rank_has_its_gpu(gpu, monkeypatch):
    monkeypatch.setattr(steps, "_rate", lambda *_: 5.0)
    monkeypatch.setattr(steps.gpu_aware, "detect", lambda comm: steps.GpuAwareness(True, "says so"))
    monkeypatch.setattr(steps, "make_transport", lambda *_: None)
    monkeypatch.setattr(steps.runtime, "resolve", lambda comm: comm)
    for places, goal, turns in (((0, 0), "none", True), ((0, 1), "above 1 for large messages", False)):
        group = SimpleNamespace(gather=lambda call, mine, places=places: [("host", place) for place in places])
        monkeypatch.setattr(steps, "group_of", lambda comm, group=group: group)
        staged, direct = steps.measure_transport(1, sizes=(64,), comm=SimpleNamespace(size=2))
        assert direct.goal == goal and ("take turns" in staged.what) == ("take turns" in direct.what) == turns


def test_the_help_names_every_part(capsys):
    invoke("bench", "gpu", "--help")
    printed = capsys.readouterr().out
    assert all(name in printed for name in PARTS)


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
        run.run([], None, path, True, quick=True)
    facts, printed = json.loads(path.read_text()), capsys.readouterr().out.split("end of part")[0]
    assert seen == [None, ["one"]] and [row["what"] for row in facts["rows"]] == ["one", "two"]
    assert facts["rows"][0]["value"] == 3 and facts["quick"] and facts["mpi"]
    assert "one: 3 GB/s; copy 10, ratio 0.300 (near 1)" in printed and "two: 3 GB/s" in printed


def test_a_part_that_fails_is_named_and_the_others_are_reported(gpu, comm, monkeypatch, tmp_path, capsys):
    if comm.size > 1:
        pytest.skip("for one rank")
    parts = {"good": part_of("first", "second"), "bad": part_of(), "last": part_of("third")}
    monkeypatch.setattr(run, "PARTS", parts)
    with pytest.raises(SystemExit) as left:
        run.run([], 5, tmp_path / "bench.json", True)
    assert left.value.code == 1
    facts, printed = json.loads((tmp_path / "bench.json").read_text()), capsys.readouterr().out
    assert [row["what"] for row in facts["rows"]] == ["first", "second", "third"]
    assert facts["rows"][0]["ratio"] == 0.5 and facts["versions"]["numpy"] and len(facts["gpus"]) >= 1
    assert facts["failed"] == ["bad failed: RuntimeError: no memory left"]
    assert all(word in printed for word in ("first", "third", "0.500", "near 1", "bad failed: RuntimeError"))


@pytest.mark.parametrize(
    ("names", "ranks", "match"),
    [(["transport"], 1, "needs 2 ranks"), (["ring"], 2, "needs 1 rank"), (["speed"], 1, "no part"), ([], 3, "3 ranks")],
)
def test_parts_that_these_ranks_cannot_run_are_refused(names, ranks, match):
    with pytest.raises(run.ArgumentError, match=match):
        run._chosen(names, ranks)


def test_the_table_shows_every_number(capsys):
    rows = [Row("a kernel", 1234.5, "GB/s", "copy", 2469.0, "near 1"), Row("a share", 0.5, "")]
    show_rows("bench", rows, ["a note"])
    text = capsys.readouterr().out
    for word in ("a kernel", "1234 GB/s", "copy", "2469", "0.500", "near 1", "a share", "a note"):
        assert word in text


@pytest.mark.parametrize(
    ("test", "given", "spare"),
    [
        ("test_local_attention_equals_dense", dict(kernel="", dtype="bfloat16"), True),
        ("test_local_attention_equals_dense", dict(kernel="cupy", dtype="bfloat16"), False),
        ("test_local_attention_equals_dense", dict(kernel="", dtype="float16"), False),
        ("test_all_masks_by_cudnn", dict(dtype="float16"), True),
        ("test_all_masks_by_cudnn", dict(dtype="bfloat16"), False),
    ],
)
def test_what_is_left_out_on_a_gpu_exists_and_resembles_others(test, given, spare):
    files = [TESTS / "attention" / f"test_{name}.py" for name in ("device_attention", "cudnn")]
    functions = {
        node.name: node
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert set(given) <= {argument.arg for argument in functions[test].args.args}
    assert gpu_selection.is_spare(test, SimpleNamespace(params=given)) == spare
    assert not gpu_selection.is_spare(test, None)


# -- products by two libraries


PRODUCTS = dict(repeats=1, rows=8, dim=8, hidden=8, vocab=16)


@pytest.fixture
def nvmath(emulated_gpu, monkeypatch):
    """The emulated cublasLt, as if its package were installed; the algorithms that it was told."""
    for name in ("nvmath", "nvmath.bindings"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["nvmath.bindings"], "cublasLt", cublaslt, raising=False)
    cublaslt.used.clear()
    return cublaslt.used


def test_each_product_is_measured_by_both_libraries(nvmath, monkeypatch):
    monkeypatch.delenv("MPIPIPE_PRODUCTS", raising=False)
    rows = list(kernels.measure_products(**PRODUCTS))
    assert len(rows) == 9 and all(row.value > 0 and row.peer == "cuBLAS" and row.ratio > 0 for row in rows)
    assert len(nvmath) > 9 and "MPIPIPE_PRODUCTS" not in os.environ and not products._library().measured


def test_without_nvmath_cublas_alone_is_measured(emulated_gpu, monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    rows = list(kernels.measure_products(**PRODUCTS))
    assert len(rows) == 9 and all(row.peer_value is None and "not measured" in row.goal for row in rows)
