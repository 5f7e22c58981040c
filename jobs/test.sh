#!/usr/bin/env bash
# Run the tests on four MPI ranks of this machine; installs what they need into .venv first.
#
#   bash jobs/test.sh [options of pytest]            without -m: all tests but those marked `long`
#   RANKS=2 MPI=openmpi bash jobs/test.sh            (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi
install_package test
configure_mpi
keep_bytecode
case " $* " in *" -m "*) ;; *) set -- -m "not long" "$@" ;; esac
export MPIEXEC_TIMEOUT="${MPIEXEC_TIMEOUT:-2400}"  # seconds; the last resort, tests have a limit each

status=0
"$mpiexec" -n "${RANKS:=4}" "$python" -m pytest "$@" || status=$?
if [ "$status" = 0 ]; then verdict=ok; else verdict=failed; fi
echo "mpipipe: tests $verdict mpi=$MPI ranks=$RANKS exit=$status"
exit "$status"
