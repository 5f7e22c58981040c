#!/usr/bin/env bash
# Build the source distribution and the wheel of the last commit into dist/, with the same bytes each time: times of files are
# that of the commit.
#
#   bash jobs/package.sh [FOLDER]                    (PYTHON: with the package `build`; default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-dist}")
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/tree" "$out"
git archive HEAD | tar -x -C "$work/tree"
"${PYTHON:-python3}" -m build --outdir "$work/made" "$work/tree" > "$work/log" 2>&1 || { tail -n 20 "$work/log"; exit 1; }
cp "$work"/made/*.whl "$out"
# setuptools gives the files of a source distribution the time of the build: pack it again
sdist=$(basename "$work"/made/*.tar.gz)
mkdir "$work/again"
tar -xzf "$work/made/$sdist" -C "$work/again"
tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$work/again" -c "${sdist%.tar.gz}" \
    | gzip -n > "$out/$sdist"
(cd "$out" && sha256sum ./*.whl "$sdist")
