#!/usr/bin/env bash
# Break whole MPI jobs in hundreds of ways on this machine, with both MPIs; see tests/faults/. Takes about half an hour.
#
#   bash jobs/test_faults.sh [options of pytest]              -k signal: cases whose name has this word
#   MPI=openmpi bash jobs/test_faults.sh                      with one MPI (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"

status=0
for MPI in ${MPI:-mpich openmpi}; do
    choose_mpi
    install_package test
    configure_mpi
    keep_bytecode
    MPIPIPE_TEST_LONG=1 "$python" -m pytest -m "" tests/faults/test_faults.py "$@" || status=$?
done
exit "$status"
