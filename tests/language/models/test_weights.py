"""Weights on disk: written by one replica, loaded by any cut, complete or refused."""

import errno
import os
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.damage import flipped, on_bytes, on_json, on_tensors
from support.saved_model import MODEL, cut
from support.tolerance import close_norm
from support.training_tolerance import path, roundings
from support.windows import generate, validation_batch

from mpipipe import Mesh, nn, schedules
from mpipipe.attention import Local
from mpipipe.checkpoint import TensorFile
from mpipipe.errors import ArgumentError, NonFiniteError
from mpipipe.language.data import find
from mpipipe.language.inference.generation import build_decoder, shown
from mpipipe.language.inference.prompts import Bytes
from mpipipe.language.models import GPT, weights
from mpipipe.planning.layer_plan import LayerPlan
from mpipipe.train import TrainConfig, train


def saved(comm, folder, pipe, chunks=1, seed=5):
    """Write the weights of MODEL from `pipe` ranks with `chunks` stages each, and as many replicas as there are."""
    schedule = schedules.interleaved_1f1b(pipe, chunks, 4)
    with Mesh(comm, pipe=pipe) as mesh:
        stages = cut(schedule.stages, schedule.stages_of(mesh.pipe.rank), seed=seed)
        if mesh.replicas.rank:
            for stage in stages:
                stage.parameters.flat.fill(np.nan)  # what other replicas have is never written
        weights.save(folder, MODEL, stages, schedule, mesh)
    comm.Barrier()
    return weights.own_arrays(cut(1, [0], seed=seed))


@pytest.mark.parametrize(("pipe", "chunks"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_any_cut_loads_what_any_other_saved(comm, mpi_tmp_path, pipe, chunks):
    if comm.size % pipe:
        pytest.skip(f"needs a multiple of {pipe} ranks")
    expected = saved(comm, mpi_tmp_path / "weights", pipe, chunks)
    for stages in (1, 2, 3, 8):
        seen = {}
        for stage in cut(stages, range(stages), seed=9):
            weights.load(mpi_tmp_path / "weights", [stage])
            seen.update(stage.parameters)
        assert list(seen) == list(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(seen[name], array)


@pytest.mark.parametrize(("dtype", "kept", "count"), [("float64", "float64", path), ("bfloat16", "float32", roundings)])
def test_a_training_leaves_the_weights_whose_loss_and_sample_it_reports(comm, mpi_tmp_path, capsys, dtype, kept, count):
    text, out = mpi_tmp_path / "text.txt", str(mpi_tmp_path / "run")
    if comm.rank == 0:
        text.write_text("one two three four " * 400)
    comm.Barrier()
    config = TrainConfig(
        data=[str(text)], out=out, dim=16, layers=2, heads=2, seq_len=16, batch=4, microbatches=2, steps=20, warmup=2,
        lr=1e-2, eval_batches=1, sample_bytes=20, dtype=dtype, pipe=comm.size,
    )  # fmt: skip
    record = train(config, GPT, comm)
    found = weights.describe(weights.folder_of(out))
    assert found.dtype == kept
    stage = nn.Stage(GPT(**found.model).build(Local()), found.dtype, seed=7)
    weights.load(weights.folder_of(out), [stage])
    batch = dict(index=0, batches=1, batch=4, rows=slice(0, 4), seq_len=16)
    validation = find([text]).open(16).validation
    inputs, targets = validation_batch(validation, **batch)
    loss, _ = nn.softmax_cross_entropy(stage.forward(inputs)[0], targets)
    close_norm(loss, record.validation, count(GPT(**found.model)), dtype, "the loss")
    prompt, printed = validation.read(0, 32).tobytes(), capsys.readouterr().out
    with Mesh(comm) as alone:
        model, plan = GPT(**found.model), LayerPlan(schedules.gpipe(1, 1), [(0, 6)], rows=1)
        with build_decoder(
            model, plan, alone, kept, 52, lambda own: weights.load(weights.folder_of(out), own)
        ) as decoding:
            answer = generate(decoding, prompt, 20, temperature=0.8, seed=config.seed)
    assert (shown(Bytes().decode(prompt + answer)) in printed) == (comm.rank == 0)


ONE = "stage-0.safetensors"


def described_as(text):
    return lambda folder: (folder / "model.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (on_tensors(ONE, lambda tensors: tensors.update({"0.weight": np.zeros((3, 8), np.float32)})),
         r"0\.weight does not fit the model\s+found: float32\[3, 8\].*\s+expected: float32\[256, 8\]"),
        (on_tensors(ONE, lambda tensors: tensors.pop("0.weight")), r"have no parameter 0\.weight"),
        (on_bytes(ONE, lambda content: content[: len(content) // 2]),
         "a file of weights is damaged: "),
        (on_bytes(ONE, flipped(-1)), r"parameter \S+ is damaged"),
        (on_tensors(ONE, lambda tensors: tensors.update({name: array + 1 for name, array in tensors.items()})),
         r"parameter 0\.weight is damaged.*\s+found: checksum \w{8} in .*stage-0.safetensors"),
        (on_json("model.json", lambda facts: facts["model"].update(rope_base=10001.0)), r"description is damaged"),
        (on_tensors(ONE, lambda tensors: tensors.update(
            {name: array.astype(ml_dtypes.float8_e4m3fn) for name, array in tensors.items()})),
         "a file of weights is damaged: '0.weight' has the dtype F8_E4M3, which is none of"),
        (lambda folder: (folder / ONE).unlink(), "cannot be read"),
        (described_as("[" * 100_000), "description cannot be read"),
        *((described_as(text), "description cannot be read") for text in ('{"model": {}}', "5", '"x"')),
        (described_as('{"model": 1, "dtype": "float32", "stages": 1, "checksums": {}, "checksum": ""}'), "is damaged"),
        (described_as('{"model": {}, "dtype": "float32", "stages": 1, "checksums": {}, "checksum": ""}'), "is damaged"),
    ],
)  # fmt: skip
def test_damaged_weights_are_refused(comm, mpi_tmp_path, damage, match):
    saved(comm, mpi_tmp_path, 1)
    if comm.rank == 0:
        damage(Path(mpi_tmp_path))
    comm.Barrier()
    with pytest.raises(ArgumentError, match=match):
        weights.load(mpi_tmp_path, cut(1, [0]))


def test_weights_load_into_stages_of_another_dtype(comm, mpi_tmp_path):
    expected = saved(comm, mpi_tmp_path, 1)
    (stage,) = cut(1, [0], dtype="float64", seed=9)
    weights.load(mpi_tmp_path, [stage])
    for name, array in expected.items():
        np.testing.assert_array_equal(stage.parameters[name], array.astype(np.float64))


def test_a_file_that_cannot_be_read_any_more_is_the_one_that_is_named(comm, mpi_tmp_path, monkeypatch):
    saved(comm, mpi_tmp_path, 1, chunks=2)
    whole = TensorFile.read_into

    def read_into(self, *arguments):
        if self.path.name == "stage-0.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        whole(self, *arguments)

    monkeypatch.setattr(TensorFile, "read_into", read_into)
    with pytest.raises(ArgumentError, match="cannot be read: Input/output error") as caught:
        weights.load(mpi_tmp_path, cut(1, [0]))
    assert "stage-0.safetensors" in caught.value.found


def test_a_flipped_bit_in_a_part_that_is_not_loaded_is_no_matter(comm, mpi_tmp_path):
    saved(comm, mpi_tmp_path, 1)
    if comm.rank == 0:
        on_bytes(ONE, flipped(-1))(mpi_tmp_path)
    comm.Barrier()
    weights.load(mpi_tmp_path, cut(4, [0]))  # each rank looks at what it reads


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(comm, mpi_tmp_path, value):
    schedule = schedules.one_f_one_b(1, 1)
    with Mesh(comm, pipe=1) as mesh:
        stages = cut(1, [0])
        list(stages[0].parameters.values())[3].reshape(-1)[2] = value
        name = list(stages[0].parameters)[3]
        weights.save(mpi_tmp_path, MODEL, stages, schedule, mesh)
    comm.Barrier()
    with pytest.raises(NonFiniteError, match=f"parameter {re.escape(name)} is not finite") as caught:
        weights.load(mpi_tmp_path, cut(1, [0]))
    assert "1 of " in caught.value.found and "stage-0.safetensors" in caught.value.found


@contextmanager
def full_disk(comm):
    """The disk of the last rank has no room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if comm.rank == comm.size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(ArgumentError, match="cannot be written"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    comm.Barrier()


def test_a_save_that_fails_or_is_killed_leaves_the_model_that_was_there_and_no_unfinished_files(comm, mpi_tmp_path):
    folder = mpi_tmp_path / "weights"
    with full_disk(comm):
        saved(comm, folder, comm.size)
    assert os.listdir(mpi_tmp_path) == []
    comm.Barrier()
    expected = saved(comm, folder, comm.size)
    if comm.rank == 0:
        (folder / "notes.txt").write_text("mine")
    comm.Barrier()
    with full_disk(comm):
        saved(comm, folder, comm.size, seed=6)
    stage = cut(1, [0], seed=9)[0]
    weights.load(folder, [stage])
    assert all((stage.parameters[name] == array).all() for name, array in expected.items())
    comm.Barrier()
    expected = saved(comm, folder, comm.size, seed=6)
    weights.load(folder, [stage])
    assert all((stage.parameters[name] == array).all() for name, array in expected.items())
    assert (folder / "notes.txt").read_text() == "mine" and os.listdir(mpi_tmp_path) == ["weights"]
