#!/usr/bin/env bash
# Check and measure mpipipe on the GPU of this machine, in at most nine minutes, without installing or fetching anything:
# cuDNN's attention, CUDA graphs, NCCL, the tests of device code on one rank, `bench gpu`, and the tests on 2 and 4 ranks that share the GPU.
#
#   bash jobs/gpu_check.sh
#   QUICK=1          the first look, in three minutes: versions, cuDNN, tests of arrays, libraries and kernels, smallest
#                    benches
#   PYTHON=python3   interpreter with numpy, cupy, mpi4py, ml_dtypes, threadpoolctl, safetensors, pytest and
#                    hypothesis; mpipipe is taken from this source tree
#   MPIEXEC=...      launcher of the MPI that mpi4py uses; by default the one beside PYTHON, or the one on PATH
#   RESULTS=folder   for gpu_check.json, gpu_check.md and logs; by default a new one below results/. All of it comes in
#                    folder.tar.gz, too
#   LIMIT=540        seconds for everything; what it cuts short is no failure (180 with QUICK=1)
#   PROCESSES=8      that compile kernels at a time, into CuPy's cache (CUPY_CACHE_DIR, ~/.cupy/kernel_cache)
#   TESTS=...        files or folders to test, by default tests; only tests with the marker `gpu` are run
#
# Ends with one table, and with exit code 0 where no correctness check failed, 1 where one did, 2 without a GPU, or
# without CUDA's compiler, headers or cuBLAS. Attention by another kernel than cuDNN's is a failure, unless
# MPIPIPE_ATTENTION=cupy asks for it.
set -euo pipefail
MPI=found
. "$(dirname "$0")/common.sh"
configure_mpi
export PYTHON="${PYTHON:-python3}" PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -c 'import mpipipe.gpu_check' 2> >(tail -n 1 >&2) || fail "$PYTHON cannot import what mpipipe needs"
exec "$PYTHON" -m mpipipe.gpu_check
