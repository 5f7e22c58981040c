"""`train --dry-run` as users start it: without MPI, for any number of ranks."""

import re

import pytest
from support.command_line import invoke
from support.small_training import estimate

from mpipipe.cli.train import described
from mpipipe.language.models import GPT
from mpipipe.text import shown_bytes
from mpipipe.train import TrainConfig

SIZES = dict(dim=16, layers=2, heads=2, seq_len=16, batch=8, microbatches=2, device="cpu")
FLAGS = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(value))]
WITHOUT_MPI = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}


@pytest.mark.parametrize("keys", [{}, {"schedule": "interleaved_1f1b", "chunks": 2}, {"pipe": 1, "seq": 2}])
def test_every_rank_has_a_line_whose_parts_are_its_total(keys):
    found = estimate(TrainConfig(**SIZES, **keys), GPT, 2)
    lines = described(None, None, 1e14, found).splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("rank  layers"))
    rows, layers = lines[head + 2 : head + 2 + found.problem.ranks], []
    for rank, row in enumerate(rows):
        *parts, total = (float(number) for number in re.findall(r"\d+\.\d", row))
        assert row.split()[0] == str(rank) and len(parts) == 8
        layers += [n for cut in re.findall(r" (\d+)-(\d+)", row) for n in range(int(cut[0]), int(cut[1]) + 1)]
        assert sum(parts) == pytest.approx(total, abs=0.5)
        assert total == pytest.approx(found.ranks[rank].total / 2**20, abs=0.06)
    assert sorted(layers) == list(range(2 * SIZES["layers"] + 2))
    assert all(len(line) <= 110 for line in lines)
    assert f"takes most: {shown_bytes(max(each.total for each in found.ranks))}" in lines[-1]


def test_steps_of_ranks_that_share_network_cards_are_foreseen_for_both_placements():
    """One micro-batch, no sums: each message of 4 replicas on a card waits for three others, those of one for none."""
    keys = dict(pipe=4, layers=4, batch=4, microbatches=1)
    found = estimate(TrainConfig(**SIZES | keys), GPT, 16)
    lines = described(1, "0,1,4", 1e30, found).splitlines()
    sizes = found.ranks[0].inputs
    sums = [2 * 3 / 4 * memory.gradients for memory in found.ranks]
    # Forwards and backwards take no time: three messages there and three back, then the sum of the first rank.
    replicas = 4 * 2 * sum(sizes[1:])
    line = next(line for line in lines if "with replicas of a stage on a node" in line)
    assert float(re.search(r"mpipipe:   (\S+) s", line)[1]) == pytest.approx(replicas, rel=1e-3)
    # All four stages of a pipeline share the card for their sums.
    line = next(line for line in lines if "with stages of a pipeline on a node" in line)
    assert float(re.search(r"mpipipe:   (\S+) s", line)[1]) == pytest.approx(sum(sums), rel=1e-3)
    assert "place replicas of a stage" in lines[8] and all(len(line) <= 110 for line in lines)


def test_a_dry_run_needs_no_mpi_and_writes_nothing(launch, tmp_path):
    out = tmp_path / "run"
    job = launch(
        0, ["-m", "mpipipe", "train", "--dry-run", "--ranks", "4", "--pipe", "2", "--out", str(out), *FLAGS],
        env=WITHOUT_MPI,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert "nothing is trained. 4 ranks = pipe 2 x data 2 x seq 1" in job.stdout
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ranks", "0"], "--ranks: 0 is out of range"),
        (["--ranks", "3", "--pipe", "2"], "the mesh does not fit the ranks"),
        (["--lr", "nan"], "lr (learning rate"),
        (["--plan", "auto"], "a dry run cannot foresee what a plan chooses"),
        (["--nic", "0,1"], "--nic without --nics-per-node"),
        (["--nics-per-node", "3"], "do not share its network cards evenly"),
        (["--nics-per-node", "0"], "--nics-per-node"),
        (["--nics-per-node", "1", "--nic", "fast"], "no model of links"),
    ],
)
def test_what_cannot_be_foreseen_is_one_error(alone, flags, text):
    ended = invoke("train", "--dry-run", *FLAGS, *flags)
    assert ended.code == 2 and ended.report.count(text) == 1, ended.report


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "flags", "text"),
    [
        (0, ["--ranks", "4"], "--ranks without --dry-run"),
        (2, ["--dry-run", "--ranks", "4"], "--dry-run is for one process"),
    ],
)
def test_ranks_are_for_a_dry_run_in_one_process(launch, ranks, flags, text):
    job = launch(ranks, ["-m", "mpipipe", "train", *flags])
    assert job.returncode != 0
    assert job.stderr.count(text) == 1 and "Traceback" not in job.stderr, job.stderr
