#!/usr/bin/env bash
# Check and measure mpipipe on the GPU of this machine, in at most nine minutes, without installing or fetching anything:
# the tests of device code on one rank, `bench gpu`, and the tests on 2 and 4 ranks that share the GPU.
#
#   bash jobs/gpu_check.sh
#   QUICK=1          the first look, in three minutes: versions, tests of arrays, libraries and kernels, smallest benches
#   PYTHON=python3   interpreter with numpy, cupy, mpi4py, ml_dtypes, threadpoolctl, typer, rich, safetensors, pytest and
#                    hypothesis; mpipipe is taken from this source tree
#   MPIEXEC=...      launcher of the MPI that mpi4py uses; by default the one beside PYTHON, or the one on PATH
#   RESULTS=folder   for gpu_check.json, gpu_check.md and logs; by default a new one below results/
#   LIMIT=540        seconds for everything; what it cuts short is no failure (180 with QUICK=1)
#   TESTS=...        files or folders to test, by default tests; only tests with the marker `gpu` are run
#
# Ends with one table, and with exit code 0 where no correctness check failed, 1 where one did, 2 without a GPU.
set -uo pipefail
MPI=found
. "$(dirname "$0")/common.sh"
configure_mpi
python=${PYTHON:-python3} quick=${QUICK:-0}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
if [ "$quick" = 1 ]; then limit=180 tests_limit=100; else limit=540 tests_limit=260; fi
deadline=$((SECONDS + ${LIMIT:-$limit}))

"$python" -c 'import mpipipe.arrays as a; a.check_device("cuda")' > /dev/null 2> >(tail -n 3 >&2) ||
    fail "this check needs a GPU that $python can use through CuPy"
mkdir -p "${results:=${RESULTS:-results/gpu_check-$(date +%Y%m%d-%H%M%S)}}" || fail "cannot write to $results"
: > "$results/checks.tsv"

# note KIND NAME STATUS SECONDS WHY
note() {
    local IFS=$'\t'
    echo "$*" >> "$results/checks.tsv"
    echo "gpu_check: $2 $3${5:+ ($5)}"
}

# skip NAMES WHY: tests that are not run
skip() {
    local name
    for name in $1; do note correctness "$name" skipped 0 "$2"; done
}

# check KIND NAME SECONDS COMMAND...: run it for so long at most; one that fails does not stop the others
check() {
    local kind=$1 name=$2 limit=$3 log="$results/$2.log" start=$SECONDS left=$((deadline - SECONDS)) status=0 cut=0 why
    shift 3
    if [ "$limit" -gt "$left" ]; then limit=$left cut=1; fi
    if [ "$limit" -lt 5 ]; then
        note "$kind" "$name" skipped 0 "no time left"
        return
    fi
    # INT: pytest then tells what it has found so far
    timeout --signal=INT --kill-after=10 "$limit" "$@" > "$log" 2>&1 < /dev/null || status=$?
    why=$(grep -aE '[0-9]+ (passed|skipped|failed|error).* in [0-9.]+s' "$log" | tail -n 1 | tr -d '=\t')
    case $status in
        0) note "$kind" "$name" ok $((SECONDS - start)) "$why" ;;
        124 | 137)
            status=failed
            case $cut$why in 1*failed* | 1*error*) ;; 1*) status=cut ;; esac
            note "$kind" "$name" "$status" $((SECONDS - start)) "ended at $limit s; see $log${why:+: $why}"
            ;;
        *)
            [ -n "$why" ] || why=$(grep -avE '^[[:space:]=_-]*$' "$log" | tail -n 1 | cut -c 1-200 | tr '\t' ' ')
            note "$kind" "$name" failed $((SECONDS - start)) "exit $status; see $log: $why"
            ;;
    esac
}

# mpiexec, if it starts ranks that see each other
find_mpiexec() {
    local beside
    beside=$("$python" -c 'import os, sys; print(os.path.join(os.path.dirname(sys.executable), "mpiexec"))')
    for mpiexec in ${MPIEXEC:+"$MPIEXEC"} "$beside" mpiexec; do
        command -v "$mpiexec" > /dev/null || continue
        [ "$(timeout 60 "$mpiexec" -n 2 "$python" -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.size)' 2> /dev/null |
            tr -d '\n')" = 22 ] && return
    done
    return 1
}

# no_mpi REASON: how to come by an MPI on a machine that fetches nothing
no_mpi() {
    cat << TEXT
gpu_check: $python cannot load MPI: $1
  The tests need it, the measurements on one rank do not. With the package index at hand:
    $python -m pip install mpi4py mpich
  Without: on another machine \`pip download --no-deps mpich\` (and mpi4py, where it is missing), and here
    $python -m pip install --no-index --no-deps --ignore-installed --prefix SITE mpich-*.whl
    LD_LIBRARY_PATH=SITE/lib MPIEXEC=SITE/bin/mpiexec bash jobs/gpu_check.sh
TEXT
}

tests=(-m pytest -q --color=no --durations=10 -p no:cacheprovider -m gpu -p support.gpu_selection)
"$python" -c 'import pytest_mpi' 2> /dev/null || tests+=(-p support.mpi_stand_in)
files=(tests)
if [ -n "${TESTS:-}" ]; then
    read -r -a files <<< "$TESTS"
elif [ "$quick" = 1 ]; then
    files=(tests/arrays tests/nn/test_device_kernels.py)
fi

check information info 60 "$python" -m mpipipe info
cat "$results/info.log"
mpi=1 mpi_error=$("$python" -c 'from mpi4py import MPI' 2>&1 > /dev/null) || mpi=0
if [ "$mpi" = 1 ]; then
    check correctness tests-1 "$tests_limit" "$python" "${tests[@]}" --few-plans "${files[@]}"
else
    reason=$(echo "$mpi_error" | grep -aE '^[A-Za-z_.]+(Error|Exception)' | tail -n 1)
    no_mpi "${reason:-$(echo "$mpi_error" | tail -n 1)}"
    skip tests-1 "no MPI library"
fi
if [ "$quick" = 1 ]; then
    check measurement bench 75 "$python" -m mpipipe bench gpu --quick --no-peers --json "$results/bench.json"
else
    check measurement bench 230 "$python" -m mpipipe bench gpu --json "$results/bench.json"
fi
cat "$results/bench.log" 2> /dev/null

if [ "$quick" = 1 ]; then
    :
elif [ "$mpi" = 0 ]; then
    skip "tests-2-staged tests-4-staged tests-direct" "no MPI library"
    note measurement bench-2 skipped 0 "no MPI library"
elif find_mpiexec; then
    check measurement bench-2 60 "$mpiexec" -n 2 "$python" -m mpipipe bench gpu --json "$results/bench-2.json"
    cat "$results/bench-2.log" 2> /dev/null
    direct=$(timeout 60 "$mpiexec" -n 2 "$python" -m mpipipe info 2> /dev/null | grep -m 1 -E '^GPU-aware' || true)
    ways="0:staged"
    case $direct in
        *" direct: "*) ways="0:staged 1:direct" ;;
        *) skip tests-direct "${direct:-this MPI is not known to take device memory}" ;;
    esac
    for way in $ways; do
        for ranks in 2 4; do
            MPIPIPE_GPU_DIRECT=${way%:*} check correctness "tests-$ranks-${way#*:}" 130 \
                "$mpiexec" -n "$ranks" "$python" "${tests[@]}" --few-plans --several-ranks "${files[@]}"
        done
    done
else
    skip "tests-2-staged tests-4-staged tests-direct" "no mpiexec starts ranks that see each other"
    note measurement bench-2 skipped 0 "no mpiexec starts ranks that see each other"
fi

"$python" - "$results" << 'PYTHON'
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

from mpipipe import arrays
from mpipipe.cli.bench.gpu.run import versions

folder = Path(sys.argv[1])
names = ("kind", "check", "status", "seconds", "why")
checks = [dict(zip(names, line.split("\t"))) for line in (folder / "checks.tsv").read_text().splitlines()]
(folder / "checks.tsv").unlink()
benches = [json.loads(path.read_text()) for path in sorted(folder.glob("bench*.json"))]
rows = [row for bench in benches for row in bench["rows"]]
problems = [problem for bench in benches for problem in bench["failed"]]
git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
facts = {"date": date.today().isoformat(), "commit": git.stdout.strip() or "unknown", "gpus": arrays.describe_gpus()}
facts |= {"versions": versions(), "checks": checks, "measurements": rows, "failed measurements": problems}
(folder / "gpu_check.json").write_text(json.dumps(facts, indent=1) + "\n")


def table(head, lines):
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in cells)


def number(value):
    return "" if value is None else f"{value:.4g}"


about = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
text = [
    f"# {'; '.join(facts['gpus'])}",
    f"`jobs/gpu_check.sh` on {facts['date']}, commit {facts['commit']}: {about}.",
    table(["check", "outcome", "seconds", ""], [[c["check"], c["status"], c["seconds"], c.get("why", "")] for c in checks]),
    table(
        ["measured", "value", "beside", "value", "ratio", "goal"],
        [[r["what"], f"{number(r['value'])} {r['unit']}", r["peer"], number(r["peer_value"]), number(r["ratio"]), r["goal"]]
         for r in rows],
    ) if rows else "Nothing was measured.",
    *(f"- {problem}" for problem in problems),
]
(folder / "gpu_check.md").write_text("\n\n".join(text) + "\n")
width = max(len(check["check"]) for check in checks)
print()
for check in checks:
    print(check["check"].ljust(width), check["status"].ljust(7), check["seconds"].rjust(4), "s ", check.get("why", ""))
wrong = [check["check"] for check in checks if check["kind"] == "correctness" and check["status"] == "failed"]
print(f"mpipipe: gpu check {'failed' if wrong else 'ok'} {' '.join(wrong)} results={folder}/gpu_check.md")
sys.exit(bool(wrong))
PYTHON
