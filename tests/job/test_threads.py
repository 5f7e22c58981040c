"""Numbers of BLAS threads: the user's where there is one, and one thread a rank everywhere else."""

from __future__ import annotations

import os

import pytest

SCRIPT = """
import numpy, threadpoolctl
from mpipipe import processor
from mpipipe.job import runtime
processor.limit_blas_threads()
print({pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"})
"""
UNSET = {"OPENBLAS_NUM_THREADS": "", "MKL_NUM_THREADS": "", "BLIS_NUM_THREADS": ""}


@pytest.mark.parametrize("setting", ["", "x", "0", "-2", "2,", ","])
def test_a_setting_that_is_no_number_of_threads_means_one(launch, setting):
    job = launch(0, SCRIPT, env={**UNSET, "OMP_NUM_THREADS": setting})
    assert job.returncode == 0, job.stderr
    assert job.stdout.strip() == "{1}"


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has one thread")
@pytest.mark.parametrize("setting", ["2", " 2 ", "2,1"])
def test_a_number_of_threads_that_the_user_set_is_left_alone(launch, setting):
    job = launch(0, SCRIPT, env={**UNSET, "OMP_NUM_THREADS": setting})
    assert job.returncode == 0, job.stderr
    assert job.stdout.strip() == "{2}"
