"""A training is to go on behind a damaged checkpoint: refused with an error of mpipipe, or it ends as it should."""

import json
import shutil

import pytest
from hypothesis import event, given, settings
from support import harness
from support.damage import SEALED, damages, sealed
from support.small_training import config_in

from mpipipe import checkpoint
from mpipipe.errors import ConfigError, MpipipeError
from mpipipe.job import inprocess
from mpipipe.language.models import GPT
from mpipipe.train import train

NEWEST = "step-00000002"
KEPT = ("metrics.jsonl", "checkpoints/step-00000001/manifest.json")


def go_on(folder):
    """The last record of a training of three steps on two ranks of one process, which goes on where it was."""
    config = config_in(folder.parent, dim=8, layers=1, heads=1, hidden=8, seq_len=8, batch=4)
    chosen = config(folder.name, steps=3, save_every=1, keep=9, resume="auto")
    return inprocess.run(2, lambda comm: train(chosen, GPT, comm))[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder of a training that ended behind its second step, outcome of the one that made a third)"""
    folder = tmp_path_factory.mktemp("run")
    go_on(folder / "three")
    shutil.copytree(folder / "three", folder / "two")
    for name in ("checkpoints/step-00000003", "weights"):
        shutil.rmtree(folder / "two" / name)
    return folder / "two", outcome(folder / "three")


def outcome(folder):
    found = checkpoint.read(folder)
    return found.step, {path.name: path.read_bytes() for path in sorted(found.path.glob("part-*"))}


def copy_of(run):
    folder = run[0].parent / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run[0], folder)
    return folder


@settings(max_examples=300 if harness.AT_LENGTH else 25)
@given(damage=damages(("files",)))
def test_a_damaged_checkpoint_is_refused_or_harmless(allow_seconds, run, damage):
    allow_seconds(600)
    (name, damage), folder = damage, copy_of(run)
    damage(folder / "checkpoints" / NEWEST)
    kept = [(folder / each).read_bytes() for each in KEPT]
    try:
        record = go_on(folder)
    except MpipipeError as error:
        event("refused")
        assert error.remedy and str(folder) in f"{error.found} {error.expected} {error.remedy}"
        assert [(folder / each).read_bytes() for each in KEPT] == kept
        return
    event("taken")
    assert record.step == 3
    if not name.startswith(SEALED):  # somebody who knows the format may say that the training was another one
        assert outcome(folder) == run[1], name


@pytest.mark.parametrize("model", [[], [1], "GPT", None, 5])
def test_a_checkpoint_without_the_sizes_of_its_model_is_refused_by_name(run, model):
    folder = copy_of(run)
    path = folder / "checkpoints" / NEWEST / "manifest.json"
    facts = json.loads(path.read_text())
    facts["state"]["model"] = model
    path.write_text(sealed(facts))
    with pytest.raises(ConfigError, match="not one of `mpipipe train`") as caught:
        go_on(folder)
    assert caught.value.found == str(path.parent)
