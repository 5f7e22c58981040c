#!/usr/bin/env bash
# Compare with other libraries (PyTorch, transformers, PEFT, JAX, CuPy) on MPI ranks of this machine: the tests marked `judges`.
# They are installed into an environment of their own, .venv-judges, since the package itself needs none of them. SimGrid
# is compared with where the Python of the system has it (Debian: python3-simgrid).
#
#   bash jobs/test_judges.sh [options of pytest]
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash jobs/test_judges.sh     PyTorch for CPUs, which is smaller
#   RANKS=2 MPI=openmpi bash jobs/test_judges.sh             (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi
venv=$venv-judges
install_package test judges
configure_mpi
export NPROC="${NPROC:-2}"  # threads of JAX, which calls back in one: an MPI may bind a rank to one core
run_tests judges 2 -m judges "$@"
