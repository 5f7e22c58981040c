"""The tasks of docs/tasks: the same numbers on any mesh, and models that learn what they are to learn."""

import runpy

import pytest
from support.launch import ROOT
from support.small_training import metrics

from mpipipe.errors import DataError
from mpipipe.job import inprocess
from mpipipe.train import estimate_task, run
from mpipipe.train.task_file import TaskFileConfig, load_task

TASKS = ROOT / "docs" / "tasks"
KEYS = dict(steps=3, batch=8, microbatches=2, warmup=0, log_every=1, eval_batches=1, device="cpu")
SMALL = {
    "darcy": ("samples=48", "blocks=2", "width=8", "modes=4"),
    "weather": ("members=8", "days=2", "blocks=1", "width=24", "heads=2"),
}
INPROCESS = {
    "darcy": [(2, {"pipe": 2}), (4, {"pipe": 2, "schedule": "zero_bubble_h1"})],
    "weather": [(4, {"pipe": 1, "seq": 4})],
}


@pytest.fixture(scope="module")
def weather(tmp_path_factory):
    """A file with the weather of eight members on two days."""
    pytest.importorskip("h5py")
    path = tmp_path_factory.mktemp("data") / "weather.h5"
    runpy.run_path(str(TASKS / "weather.py"))["write"](str(path), members=8, days=2)
    return path


@pytest.fixture
def small(request, name):
    """The values with which a task is small."""
    return (*SMALL[name], f"data={request.getfixturevalue('weather')}") if name == "weather" else SMALL[name]


def train_on(comm, name, out, values, **keys):
    task = load_task(str(TASKS / f"{name}.py"), values, comm)
    return run(task, TaskFileConfig(**(KEYS | keys), out=str(out)), comm)


def trained(name, ranks, out, values, **keys):
    inprocess.run(ranks, lambda comm: train_on(comm, name, out, values, **keys))
    return metrics(out)


def numbers(found):
    names = ("loss", "validation", "relative_error", "persistence")
    return [record[name] for record in found for name in names if name in record]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_any_mesh_gives_the_numbers_of_one_rank(tmp_path, capsys, name, small):
    alone = numbers(trained(name, 1, tmp_path / "alone", small, dtype="float64"))
    for mesh, (ranks, keys) in enumerate(INPROCESS[name]):
        found = numbers(trained(name, ranks, tmp_path / f"{mesh}", small, dtype="float64", **keys))
        assert found == pytest.approx(alone, rel=1e-10)
    assert "on each rank of seq" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("members", "size", "error"), [(8, -100, ".*truncated"), (8, 0, ""), (64, None, ".*out of range")]
)
def test_a_file_that_ends_early_is_one_error_on_all_ranks(tmp_path, weather, members, size, error):
    (tmp_path / "weather.h5").write_bytes(weather.read_bytes()[:size])
    given = (*SMALL["weather"], f"members={members}", f"data={tmp_path / 'weather.h5'}")
    error = rf"Weather.batch in weather.py\(step=0, rows=\d..\d\): row \d is not in \S*weather.h5: {error}"

    def on_each_rank(comm):
        with pytest.raises(DataError, match=error) as caught:
            train_on(comm, "weather", tmp_path / "run", given, pipe=2, seq=2)
        return str(caught.value)

    assert len(set(inprocess.run(4, on_each_rank))) == 1
    assert not (tmp_path / "run").exists()


def test_memory_is_found_on_paper_for_a_loss_that_divides_by_what_is_in_its_targets(weather):
    def made(comm):
        task = load_task(str(TASKS / "weather.py"), (*SMALL["weather"], f"data={weather}"), comm)
        return TaskFileConfig(**KEYS, pipe=2), task

    assert all(rank.activations > 0 for rank in estimate_task(made, 2).ranks)


@pytest.mark.long
def test_pressures_are_better_than_half_as_wrong_as_their_mean(tmp_path):
    """The mean of all pressures has a relative error of 0.23."""
    records = trained("darcy", 2, tmp_path / "run", (), pipe=2, steps=200, batch=16, lr=6e-3, warmup=10, eval_batches=2)
    assert records[-1]["relative_error"] < 0.115


@pytest.mark.long
def test_forecasts_are_better_than_half_as_wrong_as_no_change(tmp_path):
    pytest.importorskip("h5py")
    path = tmp_path / "weather.h5"
    runpy.run_path(str(TASKS / "weather.py"))["write"](str(path), members=64, days=16)
    keys = dict(pipe=1, seq=2, steps=120, batch=16, lr=4e-3, warmup=10, eval_batches=2)
    last = trained("weather", 2, tmp_path / "run", (f"data={path}",), **keys)[-1]
    assert last["validation"] < 0.14
    assert last["validation"] < 0.5**2 * last["persistence"]
