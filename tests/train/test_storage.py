"""Storage that fails under a training, for real where the rights allow: the training ends."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress

import pytest
from support.launch import run_job
from support.small_training import training_job

from mpipipe import checkpoint

TRAINING = """
(trouble,), place = words, Path(out, "checkpoints")
filler = place / "filler"

def step(self, number, original=Trainer.step):
    if number in (3, 6):
        self.checkpoints.finish()  # so that the disk may be mounted again
        if rank == 0:
            begin() if number == 3 else end()
    comm.Barrier()
    return original(self, number)

def begin():
    if trouble == "full":
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    elif trouble == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    elif trouble == "vanishes":
        place.rename(place.with_name("gone"))
        place.write_text("a file has taken its place")

def end():
    if trouble == "full":
        filler.unlink()
    elif trouble == "read-only":
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
    elif trouble == "vanishes":
        place.unlink()

Trainer.step = step
options = dict(steps=8, sample_bytes=4, save_every=1, keep=2, resume="auto")
"""
WORDS = {"full": "No space left on device", "read-only": "Read-only file system", "vanishes": "cannot be written"}


@pytest.fixture
def disk(tmp_path):
    """disk(folder): mount a small disk of its own there; skips without the right to."""
    mounted = []

    def mount(folder):
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(folder)]
        with suppress(FileNotFoundError):
            if subprocess.run(command, capture_output=True).returncode == 0:
                mounted.append(folder)
        if not mounted:
            pytest.skip("no right to mount a disk")

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def train(launch, tmp_path, disk):
    """train(name, trouble): a job of two ranks; returns (job, output folder)."""
    script = training_job(tmp_path, TRAINING)

    def start(name, trouble="none"):
        out = tmp_path / name
        if trouble in ("full", "read-only") and not out.exists():
            disk(out / "checkpoints")
        return launch(2, [*script, str(out), trouble]), out

    return start


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The output folder of a training without trouble."""
    folder = tmp_path_factory.mktemp("whole")
    job = run_job(2, [*training_job(folder, TRAINING), str(folder / "run"), "none"], timeout=40)
    assert job.returncode == 0, job.stderr
    return folder / "run"


def losses(out):
    return [json.loads(line).get("loss") for line in (out / "metrics.jsonl").read_text().splitlines()]


def arrays_of(out):
    return {path.name: path.read_bytes() for path in sorted(checkpoint.newest(out).glob("part-*"))}


def same(out, whole):
    assert losses(out) == losses(whole) and len(losses(out)) == 9
    assert checkpoint.newest(out).name == "step-00000008"
    assert arrays_of(out) == arrays_of(whole)


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["full", "read-only", "vanishes"])
def test_storage_that_fails_ends_the_training_and_the_last_checkpoint_is_gone_on_with(train, whole, trouble):
    job, out = train("run", trouble)
    assert job.returncode == 2, job.stderr
    assert job.stderr.count("mpipipe: job ended by rank") == 1
    assert "the checkpoint cannot be written" in job.stderr and WORDS[trouble] in job.stderr
    if trouble == "vanishes":
        (out / "checkpoints").unlink()
        (out / "gone").rename(out / "checkpoints")
    assert checkpoint.newest(out).name == "step-00000003"
    if trouble == "full":
        (out / "checkpoints" / "filler").unlink()
    if trouble == "read-only":
        subprocess.run(["mount", "-o", "remount,rw", str(out / "checkpoints")], check=True)
    assert {path.name for path in (out / "checkpoints").rglob("*.partial")} == set()
    job, _ = train("run")
    assert job.returncode == 0, job.stderr
    same(out, whole)
