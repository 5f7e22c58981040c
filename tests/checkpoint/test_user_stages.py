"""Checkpoints of stages of a user's own: by `parameters`, or by `state_dict` and `load_state_dict`."""

import numpy as np
import pytest

from mpipipe import Mesh, checkpoint, nn, optim
from mpipipe.errors import ArgumentError


class Counting:
    """A stage with a matrix and a table that is no parameter; what it hands out nobody may write to."""

    def __init__(self, name, value):
        self.name, self.loaded = name, 0
        self.parameters, self.gradients = (nn.FlatBuffer({f"{name}.w": (3, 2)}, "float64") for _ in range(2))
        self.parameters.flat[:6] = value
        self.table = np.full(4, value, np.int32)

    def state_dict(self):
        found = {f"{self.name}.w": self.parameters[f"{self.name}.w"].copy(), f"{self.name}.table": self.table.copy()}
        for array in found.values():
            array.flags.writeable = False
        return found

    def load_state_dict(self, arrays):
        self.loaded += 1
        self.parameters[f"{self.name}.w"][...] = arrays[f"{self.name}.w"]
        self.table = arrays[f"{self.name}.table"].copy()


def test_a_state_dict_is_saved_and_loaded(pair, mpi_tmp_path):
    with Mesh(pair, pipe=2) as mesh:
        saved = Counting(f"part{pair.rank}", 5 + pair.rank)
        optimizer = optim.AdamW([saved], lr=0.1)
        saved.gradients.flat[:6] = 1
        optimizer.step()
        path = checkpoint.save(mpi_tmp_path, mesh, [saved], optimizer, step=1)
        other = Counting(f"part{pair.rank}", 0)
        again = optim.AdamW([other], lr=0.1)
        checkpoint.load(path, mesh, [other], again)
    np.testing.assert_array_equal(other.parameters.flat, saved.parameters.flat)
    np.testing.assert_array_equal(other.table, saved.table)
    np.testing.assert_array_equal(again.state[0]["second"], optimizer.state[0]["second"])
    assert other.loaded == 1 and again.steps == 1 and other.table.dtype == np.int32


def test_arrays_of_one_name_on_two_ranks_are_refused_before_anything_is_written(pair, mpi_tmp_path):
    """Such a checkpoint could be saved, and not be read again."""
    with Mesh(pair, pipe=2) as mesh:
        with pytest.raises(ArgumentError, match=r"ranks 0 and 1 have a parameter part\.table"):
            checkpoint.save(mpi_tmp_path, mesh, [Counting("part", 1)], step=1)
        assert not any(mpi_tmp_path.iterdir())
