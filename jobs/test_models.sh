#!/usr/bin/env bash
# Compare models of other libraries, with random weights, on MPI ranks of this machine with one process of PyTorch or JAX:
# the tests marked `models`. The libraries (neuraloperator, torchvision, timm, transformers, diffusers, torch_geometric,
# equinox, flax) are installed into an environment of their own, .venv-models, since the package itself needs none of them:
# 7 GB with PyTorch of PyPI.
#
#   bash jobs/test_models.sh [options of pytest]              such as -k gpt2
#   MPI=openmpi bash jobs/test_models.sh                      (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi
venv=$venv-models
install_package test models
configure_mpi
export NPROC="${NPROC:-2}"  # threads of JAX, which calls back in one: an MPI may bind a rank to one core
run_tests models 4 -m models "$@"
