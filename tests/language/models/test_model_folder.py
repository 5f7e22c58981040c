"""Folders with models: which kind is found where, and that each rank gets what was saved."""

from dataclasses import asdict

import numpy as np
import pytest
from support import saved_model

from mpipipe import Mesh, checkpoint, schedules
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.language.models import weights
from mpipipe.language.models.model_folder import open_model, open_on_all


def saved(mesh, folder, dtype="float64"):
    """A training's folder with weights of seed 5 and two checkpoints, of seeds 1 and 6."""
    schedule = schedules.gpipe(mesh.pipe.size, 1)
    numbers = schedule.stages_of(mesh.pipe.rank)
    stages = saved_model.cut(mesh.pipe.size, numbers, 5, dtype=dtype)
    weights.save(folder / "weights", saved_model.MODEL, stages, mesh, step=2)
    for step, seed in ((1, 1), (2, 6)):
        stages = saved_model.cut(mesh.pipe.size, numbers, seed, dtype=dtype)
        checkpoint.save(folder / "checkpoints", mesh, stages, step=step, state={"model": asdict(saved_model.MODEL)})


def loaded(found, mesh):
    stages = saved_model.cut(mesh.pipe.size, [mesh.pipe.rank], 9, dtype="float64")
    found.load(stages, mesh)
    return stages


@pytest.mark.parametrize(
    ("place", "kind", "seed"),
    [
        (".", "weights", 5),
        ("weights", "weights", 5),
        ("checkpoints", "checkpoint", 6),
        ("checkpoints/step-00000001", "checkpoint", 1),
    ],
)
def test_each_folder_of_a_training_gives_its_model(comm, mpi_tmp_path, place, kind, seed):
    with Mesh(comm, pipe=comm.size) as mesh:
        saved(mesh, mpi_tmp_path)
        found = open_on_all(comm, str(mpi_tmp_path / place))
        assert (found.kind, found.dtype, found.model) == (kind, "float64", saved_model.MODEL)
        assert found.tokenizer() is None
        expected = saved_model.cut(comm.size, [comm.rank], seed, dtype="float64")
        for stage, right in zip(loaded(found, mesh), expected):
            for name, values in right.parameters.items():
                np.testing.assert_array_equal(stage.parameters[name], values)


def test_a_training_that_went_on_after_its_end_has_a_later_checkpoint(comm, mpi_tmp_path):
    """Its weights are those of the earlier end: cut short, it has not replaced them."""
    with Mesh(comm, pipe=comm.size) as mesh:
        saved(mesh, mpi_tmp_path)
        stages = saved_model.cut(comm.size, [comm.rank], 7, dtype="float64")
        checkpoint.save(mpi_tmp_path / "checkpoints", mesh, stages, step=3, state={"model": asdict(saved_model.MODEL)})
        found = open_on_all(comm, str(mpi_tmp_path))
        assert found.kind == "checkpoint"
        (stage,) = loaded(found, mesh)
        for name, values in stages[0].parameters.items():
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
