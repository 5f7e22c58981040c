"""`train --dry-run` as users start it: without MPI for any ranks, under a launcher for those there are."""

from __future__ import annotations

import re

import pytest

from mpipipe.cli.dry_run import described
from mpipipe.models import GPT
from mpipipe.train import TrainConfig
from mpipipe.train.dry_run import foresee

SIZES = dict(dim=16, layers=2, heads=2, seq_len=16, batch=8, microbatches=2, device="cpu")
FLAGS = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(value))]
WITHOUT_MPI = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}


@pytest.mark.parametrize("keys", [{}, {"schedule": "interleaved_1f1b", "chunks": 2}, {"pipe": 1, "seq": 2}])
def test_every_rank_has_a_line_whose_parts_are_its_total(keys):
    found = foresee(TrainConfig(**SIZES, **keys), GPT, 2)
    lines = described(found).splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("rank  layers"))
    rows = lines[head + 2 : head + 2 + found.pipe]
    for rank, row in enumerate(rows):
        *parts, total = (float(number) for number in re.findall(r"\d+\.\d", row))
        assert row.split()[0] == str(rank) and len(parts) == 8
        assert sum(parts) == pytest.approx(total, abs=0.5)
        assert total == pytest.approx(found.ranks[rank].total / 1e6, abs=0.06)
    assert all(len(line) <= 110 for line in lines)
    assert f"{max(each.total for each in found.ranks):,} bytes" in lines[-1]


def test_a_dry_run_needs_no_mpi_and_writes_nothing(launch, tmp_path):
    out = tmp_path / "run"
    job = launch(
        0, ["-m", "mpipipe", "train", "--dry-run", "--ranks", "4", "--pipe", "2", "--out", str(out), *FLAGS],
        env=WITHOUT_MPI,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert "nothing is trained. 4 ranks = pipe 2 x data 2 x seq 1" in job.stdout
    assert not out.exists()


def test_a_dry_run_under_a_launcher_is_of_its_ranks_and_shown_once(launch):
    job = launch(2, ["-m", "mpipipe", "train", "--dry-run", *FLAGS])
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("nothing is trained. 2 ranks = pipe 2 x data 1 x seq 1") == 1


@pytest.mark.parametrize(
    ("ranks", "flags", "text"),
    [
        (0, ["--dry-run", "--ranks", "0"], "--ranks is out of range"),
        (0, ["--dry-run", "--ranks", "3", "--pipe", "2"], "the mesh does not fit the ranks"),
        (0, ["--dry-run", "--lr", "nan"], "lr (learning rate"),
        (0, ["--ranks", "4"], "--ranks without --dry-run"),
        (2, ["--dry-run", "--ranks", "4"], "--ranks is for a dry run in one process"),
    ],
)
def test_what_makes_no_sense_is_one_error(launch, ranks, flags, text):
    job = launch(ranks, ["-m", "mpipipe", "train", *flags])
    assert job.returncode != 0
    assert job.stderr.count(text) == 1 and "Traceback" not in job.stderr, job.stderr
