"""mpipipe simulate: what it prints, writes and refuses, without MPI."""

import pytest

from mpipipe import schedules
from mpipipe.cli.simulate import simulate
from mpipipe.job import settings
from mpipipe.job.exit import Stop
from mpipipe.schedules.registry import names


@pytest.fixture
def printed(alone, capsys):
    """printed(schedule=..., ...): the lines of the command."""

    def run(**options):
        simulate(**options)
        return capsys.readouterr().out.splitlines()

    return run


def test_a_schedule_is_shown_with_its_distance_from_the_best(printed):
    lines = printed(schedule="one_f_one_b", ranks=4, microbatches=8)
    assert lines[:6] == [
        "schedule    one_f_one_b: 4 ranks, 4 stages, 8 micro-batches",
        "makespan    33",
        "bubble      27.27% of all time, 37.50% of busy time",
        "activations 4 3 2 1 on each rank, in chunks, at most",
        "bound       27: no schedule of these stages is faster with 4 activations on each rank",
        "gap         at most 22.22% slower than the best possible schedule",
    ]
    assert lines[6:] == schedules.timeline(schedules.one_f_one_b(4, 8)).splitlines()


def test_a_large_schedule_has_no_timeline(printed):
    assert len(printed(schedule="gpipe", ranks=2, microbatches=100)) == 6


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_all_are_listed_with_those_above_the_limit_marked(printed, chunks):
    lines = printed(schedule="all", ranks=3, chunks=chunks, microbatches=9, memory_limit=3 * chunks)
    assert [line.split()[0] for line in lines] == ["schedule", *names(chunks)]
    marked = {line.split()[0] for line in lines if "above the limit" in line}
    for name in names(chunks):
        made = schedules.by_name(name, ranks=3, chunks=chunks, microbatches=9, memory_limit=3 * chunks)
        assert (max(schedules.simulate(made).peak_activations) > 3 * chunks) == (name in marked)


def test_an_order_is_written_and_read_again(printed, tmp_path):
    path = tmp_path / "order.csv"
    options = dict(forward="1,2,1", transfer="0.5", memory_limit=3.0)
    first = printed(schedule="zero_bubble_2p", ranks=3, microbatches=6, out=path, **options)
    assert first[-1] == f"order       {path}"
    assert printed(schedule=str(path), **options)[1:6] == first[1:6]


def test_forwards_are_run_again_to_keep_the_limit(printed):
    lines = printed(schedule="one_f_one_b", ranks=4, microbatches=8, memory_limit=2.0, recompute=True)
    made = schedules.with_recompute(schedules.one_f_one_b(4, 8), memory_limit=2)
    assert lines[1] == f"makespan    {schedules.simulate(made).makespan:g}"
    assert lines[4].endswith("that runs as many forwards again")


def test_slices_reach_one_schedule_all_of_them_and_a_table(printed, tmp_path):
    sizes = dict(ranks=2, microbatches=1, slices=8)
    lines = printed(schedule="one_f_one_b", **sizes)
    assert lines[:4] == [
        "schedule    one_f_one_b: 2 ranks, 2 stages, 1 micro-batch in 8 slices",
        "makespan    27",
        "bubble      11.11% of all time, 12.50% of busy time",
        "activations 8 8 on each rank, in chunks of slices, at most",
    ]
    assert lines[6:] == schedules.timeline(schedules.one_f_one_b(2, 1, slices=8)).splitlines()
    table = printed(schedule="all", **sizes)
    assert [line.split()[1] for line in table if line.startswith("one_f_one_b")] == ["27"]
    path = tmp_path / "order.csv"
    first = printed(schedule="zero_bubble_h1", **sizes, out=path)
    assert "0F0.7" in path.read_text()
    assert printed(schedule=str(path))[1:6] == first[1:6]
    again = printed(schedule="gpipe", ranks=2, microbatches=1, slices=2, recompute=True)
    assert again[-1].startswith("rank 1 ") and "1R0.1" in again[-1]


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(schedule="v_half", chunks=2, ranks=2**12, microbatches=2**12), "at most 262,144 forwards"),
        (dict(schedule="gpipe", forward="one"), "--forward is no list of numbers"),
        (dict(schedule="gpipe", transfer="1,2"), "the cost transfer does not fit"),
        (dict(schedule="gpipe", memory_limit=2.0), "does not keep the memory limit"),
        (dict(schedule="gpipe", chunks=2), "one stage per rank"),
        (dict(schedule="all", recompute=True), "--recompute does not go with --schedule all"),
        (dict(schedule="gpipe", recompute=True, memory_limit=0.5), "no choice of forwards"),
        (dict(schedule="nowhere.csv"), "cannot be read"),
        (dict(schedule="order.csv", ranks=4), "--ranks does not go with --schedule order.csv"),
        (dict(schedule="order.csv", chunks=1, microbatches=8), "--chunks 1, --microbatches 8"),
        (dict(schedule="gpipe", out="."), "the order cannot be written"),
    ],
)
def test_what_cannot_be_is_one_error_before_anything_is_printed(printed, capsys, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    paths = {name: tmp_path / options[name] for name in ("out",) if name in options}
    with pytest.raises(Stop) as caught:
        printed(**{**options, **paths})
    assert caught.value.code == 2
    assert words in caught.value.text
    assert capsys.readouterr().out == ""


def test_several_ranks_are_refused(printed, monkeypatch):
    monkeypatch.setattr(settings, "launcher_size", lambda environment: ("mpiexec", 4))
    with pytest.raises(Stop) as caught:
        printed(schedule="gpipe")
    assert "simulate is for one process" in caught.value.text and "4 ranks" in caught.value.text
