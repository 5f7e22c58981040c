"""`info` in words: cores, threads, free memory, bad placements, and AMD's GPUs by name."""

import json
import sys

import pytest

from mpipipe import arrays, environment
from mpipipe.cli.info import described, info
from mpipipe.comm import describe
from mpipipe.errors import BackendError
from mpipipe.job import inprocess
from mpipipe.job.cores import oversubscribed


def surroundings(cores, threads=1, host_cores=8):
    binding = [{"rank": rank, "host": "n1", "cores": own, "threads": threads} for rank, own in enumerate(cores)]
    hosts = [{"host": "n1", "cores": host_cores, "memory": 64 << 30, "free_memory": 48 << 30}]
    return {"binding": binding, "hosts": hosts, "oversubscribed": oversubscribed(binding)}


def test_ranks_with_the_same_cores_stand_together():
    facts = described(surroundings(["0-3", "0-3", "4-7", "4-7"], threads=2))
    assert facts["cores"] == "ranks 0-1: 0-3 on n1\nranks 2-3: 4-7 on n1"
    assert facts["threads"] == "n1: 4 ranks x 2 threads in train, on 0-7: 8 of 8 cores"
    assert facts["free memory"] == "n1: 48.0 of 64.0 GiB"


@pytest.mark.parametrize(
    ("cores", "threads", "text"),
    [
        (["3", "3"], 1, "2 threads of ranks 0-1 share 1 core of n1"),
        (["0", "1"], 4, "8 threads of ranks 0-1 share 2 cores of n1: bind ranks to more cores"),
        (["0", "1-2"], 2, "2 threads of rank 0 share 1 core of n1: bind ranks to more cores"),
        (["0", "1"], 1, "each rank on n1 is pinned to one core, and all of them use 2 of 8"),
        (["0-3", "0-3", "4-7", "4-7"], 2, None),
        ([*map(str, range(8))], 1, None),  # ranks that fill a host one by one
    ],
)
def test_a_bad_placement_is_warned_of(cores, threads, text):
    warning = described(surroundings(cores, threads)).get("warning")
    assert warning is None if text is None else text in warning


def test_each_host_has_a_line_with_its_ranks_threads_and_cores():
    found = surroundings(["0-3", "4,6", "0-1"], threads=2, host_cores=16)
    found["binding"][1]["threads"] = 1
    found["binding"][2]["host"] = "n2"
    found["hosts"].append({**found["hosts"][0], "host": "n2", "cores": 2})
    found["hosts"].append({**found["hosts"][0], "host": "n3"})
    found["binding"].append({"rank": 3, "host": "n3", "cores": "", "threads": 1})  # where the system does not say
    assert described(found)["threads"].splitlines() == [
        "n1: 1 rank x 1 thread and 1 rank x 2 threads in train, on 0-4,6: 6 of 16 cores",
        "n2: 1 rank x 2 threads in train, on 0-1: 2 of 2 cores",
        "n3: 1 rank x 1 thread in train, on cores that are not known",
    ]


def test_json_is_what_train_writes(launch):
    job = launch(2, ["-m", "mpipipe", "info", "--json"])
    assert job.returncode == 0, job.stderr
    found = json.loads(job.stdout)
    (mine,) = inprocess.run(1, lambda comm: environment.gather(comm, gpus=False))
    assert list(found) == list(mine)
    assert found["ranks"] == 2 and [place["rank"] for place in found["binding"]] == [0, 1]
    assert found["mpi"] is not None


@pytest.fixture
def amd(emulated_gpu, monkeypatch):
    """A CuPy that is built for ROCm, on which nothing compiles."""
    monkeypatch.setattr(sys.modules["cupy.cuda.runtime"], "is_hip", True)
    emulated_gpu.machine.faults |= {"headers", "cublas"}


def test_gpus_of_amd_are_named_and_refused_and_no_error_of_a_compiler(amd, capsys, monkeypatch):
    def without_mpi():  # this test runs on one rank of several
        raise BackendError("no MPI here")

    monkeypatch.setattr(describe, "describe", without_mpi)
    info()
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("GPU toolkit")]
    assert "AMD's GPUs are not supported yet" in line
    assert "bug report" in lines[-1]
    with pytest.raises(BackendError, match="AMD's GPUs are not supported yet"):
        arrays.check_device("cuda")
