"""Models of other libraries, cut as cuts.py and jax_cuts.py say, against one process of their library.

Float64, to 1e-9. Three steps of plain descent: losses, all gradients of the first step, all parameters and states after
the last. The ranks are processes.
"""

from functools import lru_cache

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from mpipipe import checkpoint, schedules
from tests.models import cuts, jax_cuts
from tests.models.training import MESHES, check_equal, interleaved, trained

pytestmark = pytest.mark.models
NAMES = [*cuts.CASES, *jax_cuts.CASES]


def made(name):
    return (cuts if name in cuts.CASES else jax_cuts).made(name)


@lru_cache(maxsize=2)
def judged(name, replicas):
    return made(name).judged(replicas)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_others_is_trained_as_by_its_library_alone(subcomm, name, mesh, recompute):
    pipe, replicas, make = MESHES[mesh]
    part = subcomm(pipe * replicas)
    if part is None:
        return
    losses, gradients, state = trained(part, made(name), pipe, replicas, make, recompute)
    if part.rank == 0:
        expected = judged(name, replicas)
        np.testing.assert_allclose(losses, expected[0], rtol=1e-9)
        check_equal(gradients, expected[1])
        check_equal(state, expected[2])


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_others_goes_on_from_a_checkpoint_on_another_mesh(subcomm, mpi_tmp_path, name):
    both, alone = subcomm(2), subcomm(1)
    if both is None:
        return
    first, *_ = trained(both, made(name), 2, 1, schedules.one_f_one_b, False, range(2), save=mpi_tmp_path)
    if alone is not None:
        newest = checkpoint.newest(mpi_tmp_path)
        losses, _, state = trained(alone, made(name), 1, 1, interleaved, True, range(2, 3), load=newest)
        expected = judged(name, 1)
        np.testing.assert_allclose([*first, *losses], expected[0], rtol=1e-9)
        check_equal(state, expected[2])
