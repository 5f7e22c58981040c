#!/usr/bin/env bash
# Submit the job scripts to a real SLURM of one node on this machine, with both MPIs of PyPI; see jobs/slurm_local.sh for
# what that needs, and what it installs where it is missing (as root, by apt-get).
#
#   bash jobs/test_slurm.sh [options of pytest]               (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"
home=$(mktemp -d)
export SLURM_LOCAL="$home/slurm"
export MPIPIPE_TEST_TIMEOUT="${MPIPIPE_TEST_TIMEOUT:-900}"  # for one test: jobs wait for each other

# a test that is ended by force leaves its SLURM behind
clean_up() {
    local conf
    for conf in $(grep -rlxF --include=slurm.conf "# made by jobs/slurm_local.sh" "$home" || true); do
        SLURM_LOCAL=$(dirname "$conf") bash jobs/slurm_local.sh stop || true
    done
    rm -rf "$home"
}
trap clean_up EXIT
bash jobs/slurm_local.sh start  # installs what is missing, so that the tests skip nothing
bash jobs/slurm_local.sh stop

status=0
for MPI in mpich openmpi; do
    choose_mpi
    install_package test
    configure_mpi
    "$python" -m pytest --basetemp="$home/$MPI" tests/jobs/test_slurm.py "$@" || status=$?
done
if [ "$status" = 0 ]; then verdict=ok; else verdict=failed; fi
echo "mpipipe: slurm $verdict exit=$status"
exit "$status"
