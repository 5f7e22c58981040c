"""Weights on disk: written by one replica, loaded by any cut, complete or refused."""

import errno
import os
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.damage import flipped, on_bytes, on_json, on_tensors
from support.saved_model import MODEL, cut, load_weights
from support.tolerance import close_norm
from support.training_tolerance import path, roundings
from support.windows import generate, validation_batch

from mpipipe import Mesh, nn, schedules
from mpipipe.attention import Local
from mpipipe.checkpoint import TensorFile
from mpipipe.errors import ArgumentError, NonFiniteError, StorageError
from mpipipe.language.data import find
from mpipipe.language.inference.generation import build_decoder, shown
from mpipipe.language.inference.prompts import Bytes
from mpipipe.language.models import GPT, weights
from mpipipe.language.models.model_folder import open_model
from mpipipe.planning.layer_plan import LayerPlan
from mpipipe.train import TrainConfig, train


def saved(comm, folder, pipe, chunks=1, seed=5):
    """Write the weights of MODEL from `pipe` ranks with `chunks` stages each, and as many replicas as there are."""
    schedule = schedules.interleaved_1f1b(pipe, chunks, 4)
    with Mesh(comm, pipe=pipe) as mesh:
        stages = cut(schedule.stages, schedule.stages_of(mesh.pipe.rank), seed=seed)
        weights.save(folder, MODEL, stages, mesh)
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
            load_weights(mpi_tmp_path / "weights", [stage])
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
    found = open_model(out)
    assert (found.kind, found.dtype) == ("weights", kept)
    stage = nn.Stage(found.model.build(Local()), found.dtype, seed=7)
    load_weights(out, [stage])
    batch = dict(index=0, batches=1, batch=4, rows=slice(0, 4), seq_len=16)
    validation = find([text]).open(16).validation
    inputs, targets = validation_batch(validation, **batch)
    loss, _ = nn.softmax_cross_entropy(stage.forward(inputs)[0], targets)
    close_norm(loss, record.validation, count(found.model), dtype, "the loss")
    prompt, printed = validation.read(0, 32).tobytes(), capsys.readouterr().out
    with Mesh(comm) as alone:
        plan = LayerPlan(schedules.gpipe(1, 1), [(0, 6)], rows=1)
        with build_decoder(found.model, plan, alone, kept, 52, lambda own: load_weights(out, own)) as decoding:
            answer = generate(decoding, prompt, 20, temperature=0.8, seed=config.seed)
    assert (shown(Bytes().decode(prompt + answer)) in printed) == (comm.rank == 0)


ONE = "step-00000000/part-0.safetensors"
MANIFEST = "step-00000000/manifest.json"


def described_as(text):
    return lambda folder: (folder / MANIFEST).write_text(text)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (on_tensors(ONE, lambda tensors: tensors.update({"0.weight": np.zeros((3, 8), np.float32)})),
         "a file of the checkpoint is damaged"),
        (on_bytes(ONE, lambda content: content[: len(content) // 2]), "is damaged: it has"),
        (on_bytes(ONE, flipped(-1)), r"is damaged: \S+ has the checksum"),
        (on_tensors(ONE, lambda tensors: tensors.update({name: array + 1 for name, array in tensors.items()})),
         r"is damaged: .*\s+found: .*part-0.safetensors"),
        (on_json(MANIFEST, lambda facts: facts["state"]["model"].update(rope_base=10001.0)), "manifest .* is damaged"),
        (lambda folder: (folder / ONE).unlink(), "cannot be read"),
        (described_as("[" * 100_000), "cannot be read"),
        *((described_as(text), "it has no format") for text in ('{"model": {}}', "5", '"x"')),
    ],
)  # fmt: skip
def test_damaged_weights_are_refused(comm, mpi_tmp_path, damage, match):
    saved(comm, mpi_tmp_path, 1)
    if comm.rank == 0:
        damage(Path(mpi_tmp_path))
    comm.Barrier()
    with pytest.raises(ArgumentError, match=match):
        load_weights(mpi_tmp_path, cut(1, [0]))


def test_weights_load_into_stages_of_another_dtype(comm, mpi_tmp_path):
    expected = saved(comm, mpi_tmp_path, 1)
    (stage,) = cut(1, [0], dtype="float64", seed=9)
    load_weights(mpi_tmp_path, [stage])
    for name, array in expected.items():
        np.testing.assert_array_equal(stage.parameters[name], array.astype(np.float64))


def test_a_file_that_cannot_be_read_any_more_is_the_one_that_is_named(comm, mpi_tmp_path, monkeypatch):
    saved(comm, mpi_tmp_path, comm.size)
    whole = TensorFile.read_into

    def read_into(self, *arguments):
        if self.path.name == "part-0.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        whole(self, *arguments)

    monkeypatch.setattr(TensorFile, "read_into", read_into)
    with pytest.raises(ArgumentError, match="cannot be read: Input/output error") as caught:
        load_weights(mpi_tmp_path, cut(1, [0]))
    assert "part-0.safetensors" in caught.value.found


def test_a_flipped_bit_in_a_part_that_is_not_loaded_is_no_matter(comm, mpi_tmp_path):
    saved(comm, mpi_tmp_path, 1)
    first = cut(4, [0])
    if comm.rank == 0:
        for part in sorted((mpi_tmp_path / ONE).parent.glob("part-*.safetensors")):
            with TensorFile(part) as file:
                last = [*file.arrays][-1].removeprefix("parameters/")
            if last not in first[0].parameters:
                on_bytes(part, flipped(-1))(mpi_tmp_path)
                break
        else:
            pytest.fail("every part ends with an array of the first stage")
    comm.Barrier()
    load_weights(mpi_tmp_path, first)  # each rank looks at what it reads


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(comm, mpi_tmp_path, value):
    with Mesh(comm, pipe=1) as mesh:
        stages = cut(1, [0])
        list(stages[0].parameters.values())[3].reshape(-1)[2] = value
        name = list(stages[0].parameters)[3]
        weights.save(mpi_tmp_path, MODEL, stages, mesh)
    comm.Barrier()
    with pytest.raises(NonFiniteError, match=f"parameter {re.escape(name)} is not finite") as caught:
        load_weights(mpi_tmp_path, cut(1, [0]))
    assert "1 of " in caught.value.found and "step-00000000" in caught.value.found


@contextmanager
def full_disk(comm):
    """The disk of the last rank has no room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if comm.rank == comm.size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(StorageError, match="cannot be written"):
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
    load_weights(folder, [stage])
    assert all((stage.parameters[name] == array).all() for name, array in expected.items())
    comm.Barrier()
    expected = saved(comm, folder, comm.size, seed=6)
    load_weights(folder, [stage])
    assert all((stage.parameters[name] == array).all() for name, array in expected.items())
    assert (folder / "notes.txt").read_text() == "mine" and os.listdir(mpi_tmp_path) == ["weights"]
