"""Folders with models: which kind is found where, and that each rank gets what was saved."""

import os
import re
from dataclasses import asdict

import numpy as np
import pytest
from support import saved_model
from support.harness import on_rank_0
from support.saved_model import MODEL, cut, load_weights
from support.tolerance import close_norm
from support.training_tolerance import path, roundings
from support.windows import validation_batch

from mpipipe import Mesh, checkpoint, nn, schedules
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError, ConfigError, NonFiniteError, StorageError
from mpipipe.language.data import find
from mpipipe.language.inference.generation import Sampling, answers, build_decoder, shown
from mpipipe.language.inference.prompts import Bytes
from mpipipe.language.models import GPT, weights
from mpipipe.language.models.model_folder import open_model, open_on_all
from mpipipe.planning.layer_plan import LayerPlan
from mpipipe.train import TrainConfig, train


def saved(mesh, folder, later=False):
    """A training's folder with weights of seed 5 and two checkpoints, of seeds 1 and 6; a third one goes on behind."""
    schedule = schedules.gpipe(mesh.pipe.size, 1)
    numbers = schedule.stages_of(mesh.pipe.rank)
    stages = saved_model.cut(mesh.pipe.size, numbers, 5, dtype="float64")
    weights.save(folder / "weights", saved_model.MODEL, stages, mesh, step=2)
    for step, seed in ((1, 1), (2, 6), (3, 7)) if later else ((1, 1), (2, 6)):
        stages = saved_model.cut(mesh.pipe.size, numbers, seed, dtype="float64")
        checkpoint.save(folder / "checkpoints", mesh, stages, step=step, state={"model": asdict(saved_model.MODEL)})


def loaded(found, mesh):
    stages = saved_model.cut(mesh.pipe.size, [mesh.pipe.rank], 9, dtype="float64")
    found.load(stages, mesh)
    return stages


@pytest.mark.parametrize(
    ("place", "kind", "seed", "later"),
    [
        (".", "weights", 5, False),
        ("weights", "weights", 5, False),
        ("checkpoints", "checkpoint", 6, False),
        ("checkpoints/step-00000001", "checkpoint", 1, False),
        # weights are those of the earlier end: a training that went on and was cut short has not replaced them
        (".", "checkpoint", 7, True),
    ],
)
def test_each_folder_of_a_training_gives_its_model(comm, mpi_tmp_path, place, kind, seed, later):
    with Mesh(comm, pipe=comm.size) as mesh:
        saved(mesh, mpi_tmp_path, later)
        found = open_on_all(comm, str(mpi_tmp_path / place))
        assert (found.kind, found.dtype, found.model) == (kind, "float64", saved_model.MODEL)
        assert found.tokenizer() is None
        expected = saved_model.cut(comm.size, [comm.rank], seed, dtype="float64")
        for stage, right in zip(loaded(found, mesh), expected):
            for name, values in right.parameters.items():
                np.testing.assert_array_equal(stage.parameters[name], values)


def test_nothing_that_is_a_model_is_refused_on_every_rank(comm, mpi_tmp_path):
    for place in (mpi_tmp_path, mpi_tmp_path / "absent"):
        with pytest.raises(ArgumentError, match="no model is here") as caught:
            open_on_all(comm, str(place))
        assert str(place) in caught.value.found


def test_a_checkpoint_of_another_script_is_refused(comm, mpi_tmp_path):
    with Mesh(comm, pipe=comm.size) as mesh:
        stages = saved_model.cut(comm.size, [comm.rank])
        checkpoint.save(mpi_tmp_path, mesh, stages, step=1)
    with pytest.raises(ConfigError, match="not one of `mpipipe train`"):
        open_model(mpi_tmp_path)


# -- weights on disk: written by one replica, loaded by any cut, complete or refused -----------------------------------


def saved_weights(comm, folder, pipe, chunks=1, seed=5):
    """Write the weights of MODEL from `pipe` ranks with `chunks` stages each, and as many replicas as there are."""
    schedule = schedules.interleaved_1f1b(pipe, chunks, 4)
    with Mesh(comm, pipe=pipe) as mesh:
        stages = cut(schedule.stages, schedule.stages_of(mesh.pipe.rank), seed=seed)
        weights.save(folder, MODEL, stages, mesh)
    comm.Barrier()
    return weights.own_arrays(cut(1, [0], seed=seed))


@pytest.mark.parametrize(("pipe", "chunks", "dtype"), [(1, 3, "float32"), (2, 2, "float64"), (4, 1, "float32")])
def test_any_cut_loads_what_any_other_saved_also_in_another_dtype(comm, mpi_tmp_path, pipe, chunks, dtype):
    if comm.size % pipe:
        pytest.skip(f"needs a multiple of {pipe} ranks")
    expected = saved_weights(comm, mpi_tmp_path / "weights", pipe, chunks)
    for stages in (1, 3):
        seen = {}
        for stage in cut(stages, range(stages), seed=9, dtype=dtype):
            load_weights(mpi_tmp_path / "weights", [stage])
            seen.update(stage.parameters)
        assert list(seen) == list(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(seen[name], array.astype(dtype))


@pytest.mark.parametrize(("dtype", "kept", "count"), [("float64", "float64", path), ("bfloat16", "float32", roundings)])
def test_a_training_leaves_the_weights_whose_loss_and_sample_it_reports(comm, mpi_tmp_path, capsys, dtype, kept, count):
    text, out = mpi_tmp_path / "text.txt", str(mpi_tmp_path / "run")
    on_rank_0(comm, text.write_text, "one two three four " * 400)
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
            (answer,) = answers(decoding, [prompt], 20, Sampling(0.8, config.seed))
    assert (shown(Bytes().decode(prompt + bytes(answer.tokens))) in printed) == (comm.rank == 0)


def test_weights_that_are_not_finite_are_refused(comm, mpi_tmp_path):
    stages = cut(1, [0])
    name = list(stages[0].parameters)[3]
    stages[0].parameters[name].reshape(-1)[2] = np.nan
    with Mesh(comm, pipe=1) as mesh:
        weights.save(mpi_tmp_path, MODEL, stages, mesh)
    comm.Barrier()
    with pytest.raises(NonFiniteError, match=f"parameter {re.escape(name)} is not finite") as caught:
        load_weights(mpi_tmp_path, cut(1, [0]))
    assert "1 of " in caught.value.found and "step-00000000" in caught.value.found


def test_a_save_replaces_the_model_where_there_is_room_and_leaves_what_others_have_put_there(comm, mpi_tmp_path, room):
    folder = mpi_tmp_path / "weights"
    if comm.rank == comm.size - 1:
        room(100)
    with pytest.raises(StorageError, match="cannot be written"):
        saved_weights(comm, folder, comm.size)
    room(None)
    comm.Barrier()
    assert os.listdir(mpi_tmp_path) == []
    comm.Barrier()
    saved_weights(comm, folder, comm.size)
    on_rank_0(comm, (folder / "notes.txt").write_text, "mine")
    expected = saved_weights(comm, folder, comm.size, seed=6)
    stage = cut(1, [0], seed=9)[0]
    load_weights(folder, [stage])
    assert all((stage.parameters[name] == array).all() for name, array in expected.items())
    assert (folder / "notes.txt").read_text() == "mine" and os.listdir(mpi_tmp_path) == ["weights"]
