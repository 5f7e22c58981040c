"""Folders with models: which kind is found where, and that each rank gets what was saved."""

from dataclasses import asdict

import numpy as np
import pytest
from support import saved_model

from mpipipe import Mesh, checkpoint, schedules
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.language.models import weights
from mpipipe.language.models.model_folder import open_model, open_on_all


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
