#!/usr/bin/env bash
# Submit the job scripts to a real SLURM of one node on this machine, with both MPIs of PyPI; see jobs/slurm_local.sh for
# what that needs, and what it installs where it is missing (as root, by apt-get).
#
#   bash jobs/test_slurm.sh [options of pytest]               (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"
SLURM_LOCAL=$(mktemp -d)/slurm
export SLURM_LOCAL
trap 'rm -rf "$(dirname "$SLURM_LOCAL")"' EXIT
bash jobs/slurm_local.sh start  # installs what is missing, so that the tests skip nothing
bash jobs/slurm_local.sh stop

status=0
for MPI in mpich openmpi; do
    choose_mpi
    install_package test
    configure_mpi
    "$python" -m pytest tests/jobs/test_slurm.py "$@" || status=$?
done
if [ "$status" = 0 ]; then verdict=ok; else verdict=failed; fi
echo "mpipipe: slurm $verdict exit=$status"
exit "$status"
