#!/usr/bin/env bash
# Check and measure mpipipe on the GPU of this machine, without installing or fetching anything: the tests of device code
# on one rank, `bench gpu`, and the tests on 2 and 4 ranks that share the GPU.
#
#   bash jobs/gpu_check.sh
#   QUICK=1          the first look: tests of arrays and kernels on one rank, and the smallest measurements
#   PYTHON=python3   interpreter with numpy, cupy, mpi4py, ml_dtypes, threadpoolctl, safetensors, pytest and
#                    hypothesis; mpipipe is taken from this source tree
#   MPIEXEC=mpiexec  launcher of the MPI that mpi4py uses
#   RESULTS=folder   for the logs, and bench.json; by default a new one below results/
#   LIMIT=260        seconds of each part
#
# Ends with exit code 0 where all parts have ended well, 1 where one has not, 2 without a GPU, or without CUDA's compiler,
# headers or cuBLAS. Attention by another kernel than cuDNN's is a failure, unless MPIPIPE_ATTENTION=cupy asks for it.
set -euo pipefail
MPI=found
. "$(dirname "$0")/common.sh"
configure_mpi
python=${PYTHON:-python3} mpiexec=${MPIEXEC:-mpiexec} results=${RESULTS:-results/gpu_check-$(date +%Y%m%d-%H%M%S)}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import mpipipe.arrays as arrays; arrays.check_device("cuda")' || fail "this check needs a GPU that $python can use"
mkdir -p "$results"
failed=()

# part NAME COMMAND...: run a command with a limit and a log; one that fails does not stop the others
part() {
    local name=$1
    shift
    echo "gpu_check: $name"
    timeout -k 10 "${LIMIT:-260}" "$@" 2>&1 | tee "$results/$name.log" || failed+=("$name")
}

# cuDNN plans each new graph for 0.1 to 0.5 s: its masks are tested in one of the two half types
tests=("$python" -m pytest -q --color=no -p no:cacheprovider -m gpu
    -k "not (test_all_masks_by_cudnn and float16 and not bfloat16)")
"$python" -c 'import pytest_mpi' 2> /dev/null || tests+=(-p support.mpi_stand_in)
part info "$python" -m mpipipe info
if [ "${QUICK:-}" = 1 ]; then
    MPIPIPE_TEST_GPU_STREAM=own part tests-1 "${tests[@]}" tests/arrays tests/nn/test_kernel_formulas.py tests/attention/test_cudnn.py
    part bench "$python" -m mpipipe bench gpu --quick --no-peers --json "$results/bench.json"
else
    MPIPIPE_TEST_GPU_STREAM=own part tests-1 "${tests[@]}" tests
    part bench "$python" -m mpipipe bench gpu --json "$results/bench.json"
    for ranks in 2 4; do
        MPIPIPE_GPU_DIRECT=0 part "tests-$ranks" "$mpiexec" -n "$ranks" "${tests[@]}" -m "gpu and ranks" tests
    done
fi
if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu_check: not as expected: ${failed[*]}; the logs are in $results"
    exit 1
fi
echo "gpu_check: all as expected; the logs are in $results"
