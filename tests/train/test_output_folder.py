"""One output folder for all ranks, whatever their working folders, and never one that a rank cannot see."""

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.small_training import config_fixture, config_in, records

from mpipipe.checkpoint import owner
from mpipipe.errors import ConfigError, OwnerError, StorageError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.train import Task, TrainConfig, output_folder, train
from mpipipe.train.config import read_keys
from mpipipe.train.trainer import Trainer


@pytest.fixture
def own_folder(comm, mpi_tmp_path, monkeypatch):
    """The working folder of this rank, which is no other rank's."""
    folder = mpi_tmp_path / f"rank-{comm.rank}"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


config = config_fixture(in_pipe=True, steps=2, log_every=10)


def test_a_relative_folder_and_the_default_are_those_of_rank_0(comm, own_folder, config, capsys):
    train(config(out="runs/a"), GPT, comm)
    comm.Barrier()
    out = own_folder.parent / "rank-0" / "runs" / "a"
    names = {f"part-{number}.safetensors" for number in range(comm.size)}
    written = {"metrics.jsonl", "weights", "config.toml", "environment.json", "train.log", "finished"}
    assert set(os.listdir(out)) == written
    assert os.listdir(out / "weights") == ["step-00000002"]
    assert set(os.listdir(out / "weights" / "step-00000002")) == {"manifest.json", *names}
    assert comm.rank == 0 or os.listdir(own_folder) == []
    if comm.rank == 0:
        assert f"metrics in {out}" in capsys.readouterr().out
    path = output_folder.shared_path(comm, None)
    assert Path(path).parent == own_folder.parent / "rank-0" / "runs"
    assert comm.allgather(path) == [path] * comm.size


def test_only_a_training_that_has_ended_well_on_all_ranks_is_finished(comm, mpi_tmp_path, config, monkeypatch):
    finished = mpi_tmp_path / "run" / "finished"
    train(config(save_every=2), GPT, comm)
    assert finished.exists()
    with pytest.raises(StorageError, match=r"has ended cannot be written(.|\n)*the training has ended well, and what"):
        output_folder.finish(mpi_tmp_path / "gone", comm)
    with pytest.raises(ConfigError, match="not empty"):
        train(config(), GPT, comm)
    assert finished.exists()  # the folder is as it was

    def fail(*_):  # all ranks know that all of them do: no message of it is left for the next test
        error = ConfigError("broken on purpose")
        error.agreed = frozenset(range(comm.size))
        raise error

    monkeypatch.setattr(Trainer, "step", fail)
    with pytest.raises(ConfigError, match="broken on purpose"):
        train(config(steps=3, resume="auto"), GPT, comm)
    assert not finished.exists()


def test_two_jobs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path):
    taken = tmp_path / "runs" / "20261231-235959"
    with ThreadPoolExecutor(8) as jobs:
        made = list(jobs.map(output_folder.new_folder, [taken] * 8))
    assert sorted(made) == [taken, *(Path(f"{taken}-{number}") for number in range(2, 9))]
    assert all(path.is_dir() for path in made)


def test_nothing_is_written_through_links(comm, mpi_tmp_path, config):
    """A file behind a link with the name of an owner or of an unfinished file stays as it is."""
    out, precious = mpi_tmp_path / "run", mpi_tmp_path / "precious"
    names = ("config.toml.partial", "owner.json")
    for name in names:
        if comm.rank == 0:
            out.mkdir(exist_ok=True)
            precious.write_text("precious")
            (out / name).symlink_to(precious)
            (out / "metrics.jsonl").touch()  # else the folder is no training's
        comm.Barrier()
        if name == "owner.json":
            with pytest.raises(OwnerError, match="no file"):
                train(config(out=str(out), resume="auto"), GPT, comm)
        else:
            train(config(out=str(out), resume="auto", steps=1, save_every=1), GPT, comm)
        comm.Barrier()
        assert precious.read_text() == "precious"
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(out)


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(not os.path.exists("/proc/self/cwd"), reason="needs /proc, where a path is another one by process")
def test_a_folder_that_each_rank_has_for_itself_is_refused_before_training(comm, own_folder, config, monkeypatch):
    monkeypatch.setattr(output_folder, "PATIENCE", 0.3)
    with pytest.raises(ConfigError, match="not there on this rank") as caught:
        train(config(out="/proc/self/cwd/run"), GPT, comm)
    assert "file system that all hosts share" in caught.value.remedy
    comm.Barrier()
    assert comm.rank > 0 or not (own_folder / "run").exists()


# -- a run folder explains itself: what it holds makes the same numbers again ------------------------------------------


def trained(ranks, config):
    inprocess.run(ranks, lambda comm: train(config, GPT, comm))
    return records(config)


def test_the_saved_configuration_gives_bit_equal_metrics(tmp_path, monkeypatch):
    """From another working folder, with all that was left open."""
    monkeypatch.chdir(tmp_path)
    small = dict(data=["text.txt"], out="first", steps=4, device="auto", microbatches=None)
    first = trained(2, config_in(tmp_path)(**small, seed=3, lr=0.1 + 0.2, dropout=0.25))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = TrainConfig.load("../first/config.toml", out="second")
    assert trained(2, again) == first and len(first) == 5
    assert (again.device, again.pipe, again.microbatches, again.vocab) == ("cpu", 2, 8, 256)
    assert again.data == (str(tmp_path / "text.txt"),)
    assert read_keys(Path("second/config.toml")) == read_keys(tmp_path / "first/config.toml")


def test_the_folder_says_where_it_was_trained_what_was_shown_and_has_the_metrics_that_were_asked_for(tmp_path, capfd):
    pytest.importorskip("tensorboardX")
    config = config_in(tmp_path)("out", steps=4, tensorboard=True)
    trained(2, config)
    environment = json.loads((tmp_path / "out/environment.json").read_text())
    assert environment["ranks"] == 2 and environment["packages"]["numpy"] == np.__version__
    assert (tmp_path / "out/train.log").read_text() == capfd.readouterr().out
    assert list((tmp_path / "out/tensorboard").iterdir())


def test_values_come_back_from_the_file_as_they_were(tmp_path):
    odd = 'a "quoted" \\ path\x7f\n\t\u00fc\U0001f600'
    keys = {"text": odd, "list": ("a", odd), "no": False, "count": 2**62, "small": 1e-300, "large": float("inf")}
    output_folder.write(tmp_path, keys, {"ranks": 1}, SimpleNamespace(handed_over="abc\u00fc", file=None))
    found = read_keys(tmp_path / "config.toml")
    assert found == {**keys, "list": list(keys["list"])}
    assert "abc\u00fc" in (tmp_path / "config.toml").read_text()
    # a path that is no text is written as it is
    output_folder.write(tmp_path, {"data": (os.fsdecode(b"/data/\xff"),)}, {"ranks": 1}, Task())
    assert b'data = ["/data/\xff"]' in (tmp_path / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match="not TOML"):
        read_keys(tmp_path / "config.toml")


def test_a_process_that_can_open_no_more_files_does_not_blame_the_folder(tmp_path, monkeypatch):
    """The file that cannot be written then says so."""

    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(tmp_path))

    def job(comm):
        monkeypatch.setattr(owner, "read", refuse)
        kept = owner.Owner(tmp_path, "token")
        output_folder.make_folder(tmp_path, comm)
        kept.release()

    inprocess.run(1, job)
