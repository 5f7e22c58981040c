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
case " $* " in *" -m "*) ;; *) set -- -m "not long" "$@" ;; esac
run_tests tests 4 "$@"
