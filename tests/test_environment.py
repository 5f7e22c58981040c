"""The environment of a run: what all ranks have alike once, and what is different with its ranks."""

import json
import os
import socket
import subprocess

import numpy as np
import pytest
from mpi4py import MPI

from mpipipe import environment
from mpipipe.job import cores, inprocess


def test_rank_0_has_what_all_ranks_say(comm):
    found = environment.gather(comm)
    if comm.rank:
        assert found is None
        return
    assert json.loads(json.dumps(found)) == found
    assert found["ranks"] == comm.size
    assert [place["rank"] for place in found["binding"]] == list(range(comm.size))
    assert found["packages"]["numpy"] == np.__version__
    assert found["mpi"]["library"].split()[0] == MPI.Get_library_version().split()[0]
    assert found["hosts"][0]["host"] == socket.gethostname()
    assert cores.parse_cores(found["hosts"][0]["ranks"]) == set(range(comm.size))
    assert found["blas"] and found["blas"][0]["threads"] >= 1


def test_only_variables_that_change_a_run_are_written(monkeypatch):
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    monkeypatch.setenv("SOME_TOKEN", "a secret")
    (found,) = inprocess.run(1, lambda comm: environment.gather(comm, gpus=False))
    assert found["variables"]["OMP_PROC_BIND"] == "close"
    assert "a secret" not in json.dumps(found)
    assert found["mpi"] is None  # ranks that are threads have none


def test_the_commit_is_that_of_the_folder_with_its_changes(tmp_path):
    assert environment.git_commit(str(tmp_path)) is None
    (tmp_path / "notes").write_text("one")
    names = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    try:
        for words in (["init", "-q"], ["add", "notes"], [*author, "commit", "-q", "-m", "first"]):
            subprocess.run(["git", "-C", tmp_path, *words], check=True, env={**os.environ, **names})
    except FileNotFoundError:
        pytest.skip("git is not installed")
    found = environment.git_commit(str(tmp_path))
    assert len(found["commit"]) == 40 and found["changed"] is False
    (tmp_path / "notes").write_text("two")
    assert environment.git_commit(str(tmp_path)) == {"commit": found["commit"], "changed": True}


def test_a_machine_without_git_has_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment.git_commit() is None


def test_two_threads_on_the_hardware_threads_of_one_core_are_too_many(monkeypatch):
    monkeypatch.setattr(environment, "own_cores", lambda: "0-1")
    monkeypatch.setattr(environment, "single_cores", lambda: [0])
    monkeypatch.setenv("MPIPIPE_THREADS", "2")
    (found,) = inprocess.run(1, lambda comm: environment.gather(comm, gpus=False))
    assert found["binding"][0]["cores"] == "0-1"
    assert found["oversubscribed"] == f"2 threads of rank 0 share 1 core of {socket.gethostname()}"
