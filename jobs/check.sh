#!/usr/bin/env bash
# Check the code without running it: format, style and docstrings, types, and who imports whom. Installs the tools into
# .venv first. Every check runs, also when one before it has failed.
#
#   bash jobs/check.sh                               (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi
install_package dev

failed=""
# check TOOL ARGUMENTS...
check() {
    "$venv/bin/$1" "${@:2}" || failed+=" $1"
}

check ruff format --check
check ruff check
check mypy
check lint-imports --no-cache

if [ -z "$failed" ]; then verdict=ok; else verdict=failed; fi
echo "mpipipe: check $verdict$failed"
[ "$verdict" = ok ]
