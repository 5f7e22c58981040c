"""Where the environment tells BLAS or numpy to compute as another processor, they do: see jobs/test_processors.sh."""

import os

import pytest
from support import processors

# names under which a build without kernels for each processor reports the ones that it has
REPORTED = {"prescott": {"prescott", "katmai"}, "zen": {"zen", "haswell"}}


def test_openblas_takes_the_kernels_that_it_is_told():
    told = os.environ.get("OPENBLAS_CORETYPE", "").lower()
    found = {name.lower() for name in processors.architectures()}
    if not told or not found:
        pytest.skip("OPENBLAS_CORETYPE is not set, or numpy has another BLAS")
    assert found <= REPORTED.get(told, {told})


def test_numpy_leaves_out_the_instructions_that_it_is_told_to():
    told = os.environ.get("NPY_DISABLE_CPU_FEATURES", "").replace(",", " ").split()
    if not told:
        pytest.skip("NPY_DISABLE_CPU_FEATURES is not set")
    assert not [name for name in told if processors.features().get(name)]
