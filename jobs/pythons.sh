#!/usr/bin/env bash
# Print the Pythons of this machine with which the package works, one of each minor version, the oldest first.
#
#   for python in $(bash jobs/pythons.sh); do PYTHON=$python bash jobs/test.sh; done
set -euo pipefail

for minor in 11 12 13; do
    for python in $(type -ap "python3.$minor") "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python3; do
        # one that can make an environment, and is no shim of another version
        if "$python" -c "import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, $minor))" 2> /dev/null; then
            echo "$python"
            break
        fi
    done
done
