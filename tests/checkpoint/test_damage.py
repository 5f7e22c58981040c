"""Damaged, foreign and hostile checkpoints: none is taken for a good one, and each error names a file and a remedy."""

import json
import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import event, given, settings
from support import harness
from support.damage import SEALED, damages, sealed

from mpipipe import Mesh, checkpoint, nn, optim
from mpipipe.checkpoint import contents
from mpipipe.errors import ArgumentError
from mpipipe.job import inprocess


def training(comm):
    """(mesh, stages, optimizer) of one of the ranks that all have the same two layers."""
    stages = [nn.Stage([nn.Linear(6, 5), nn.Linear(5, 3)], seed=1)]
    optimizer = optim.AdamW(stages, 0.1)
    for number, states in enumerate(optimizer.named_state().values()):
        for array in states.values():
            array[...] = np.random.default_rng(number).standard_normal(array.shape)
    return Mesh(comm, pipe=1), stages, optimizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2."""
    root = tmp_path_factory.mktemp("whole")

    def save(comm):
        mesh, stages, optimizer = training(comm)
        with mesh:
            for step in (1, 2):
                checkpoint.save(root, mesh, stages, optimizer, step=step, state={"a": [1.5, "text"]})

    inprocess.run(2, save)
    return root


def load(path):
    """(what load returned, all arrays)"""

    def work(comm):
        mesh, stages, optimizer = training(comm)
        for array in contents.contents_of(stages, optimizer).values():
            array[...] = np.nan
        with mesh:
            found = checkpoint.load(path, mesh, stages, optimizer)
        return found, contents.contents_of(stages, optimizer)

    return inprocess.run(1, work)[0]


@cache
def right(root):
    """(facts, arrays) of the checkpoint that is damaged."""
    found, held = load(root / "step-00000002")
    return facts_of(found), held


def facts_of(found):
    """All that a checkpoint says of itself, but where it is."""
    return replace(found, path=None)


@settings(max_examples=500 if harness.AT_LENGTH else 60)
@given(damage=damages())
def test_what_is_damaged_is_refused_with_names_and_what_is_taken_is_right(whole, tmp_path, damage):
    """A damaged copy is loaded; a whole one is beside it."""
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    path = folder / "step-00000002"
    kind, act = damage
    act(path)
    try:
        found, held = load(path)
    except ArgumentError as error:
        event("refused")
        assert str(folder) in str(error.found) and error.remedy
    else:
        event("taken")
        check_right(whole, held)
        assert kind.startswith(SEALED) or facts_of(found) == right(whole)[0]


def check_right(whole, held):
    for name, array in right(whole)[1].items():
        np.testing.assert_array_equal(held[name], array, name)


def damaged(whole, folder, change):
    """The path of a copy of step 2 whose manifest has been changed and sealed again."""
    shutil.copytree(whole, folder)
    path = folder / "step-00000002"
    facts = json.loads((path / "manifest.json").read_text())
    change(facts)
    (path / "manifest.json").write_text(sealed(facts))
    return path


def bad_header(header):
    """Also of a file that is as large as it says: a hole of a terabyte takes no room."""

    def change(facts):
        facts["files"][PART] |= {"header": header, "bytes": 2**41}
        for entry in facts["files"][PART]["arrays"].values():
            entry["start"] = 2**40

    return change


PART = "part-0.safetensors"
MANIFESTS = [  # (a change, words of the error)
    (
        lambda facts: facts["files"].update({"../secret.safetensors": facts["files"].pop(PART)}),
        "is no name of a file of a checkpoint",
    ),
    *((bad_header(header), "has a header of") for header in (7, 2**40, 2**61)),
    (lambda facts: next(iter(facts["files"][PART]["arrays"].values())).update(start=10**6), "after its file"),
    (
        lambda facts: (facts.clear(), facts.update(format=2, library="9.1", all="new")),
        r"newer format\n.*format 2 of mpipipe 9\.1(.|\n)*install",
    ),
]


@pytest.mark.parametrize(("change", "match"), MANIFESTS)
def test_a_manifest_that_lies_is_refused_before_a_file_is_opened_or_memory_asked_for(whole, tmp_path, change, match):
    path = damaged(whole, tmp_path / "copy", change)
    shutil.copy(path / PART, path.parent / "secret.safetensors")
    with open(path / PART, "r+b") as file:
        if match == "has a header of":
            file.truncate(2**41)
    with pytest.raises(ArgumentError, match=match):
        load(path)
