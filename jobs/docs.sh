#!/usr/bin/env bash
# Build the documentation into docs/_build/html; a warning fails the build. Installs what it needs into .venv first.
#
#   bash jobs/docs.sh [options of sphinx-build]      (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi
install_package docs
configure_mpi

status=0
"$python" -m sphinx --builder html --fail-on-warning --keep-going --quiet "$@" docs docs/_build/html || status=$?
if [ "$status" = 0 ]; then verdict=ok; else verdict=failed; fi
echo "mpipipe: docs $verdict exit=$status page=docs/_build/html/index.html"
exit "$status"
