#!/bin/bash
# Train the model of jobs/gpt2_small.toml, a byte-level GPT of GPT-2 small's size in bfloat16, a rank on each GPU.
#
#   bash jobs/train_gpu.sh [options of `python -m mpipipe train`]              one GPU
#   RANKS=4 bash jobs/train_gpu.sh --pipe 2                                    two pipelines of two GPUs each
#   DATA="book.txt notes" bash jobs/train_gpu.sh                               your text instead of the default
#
# PYTHON is the interpreter (python3 by default) of an environment made by `pip install '.[cuda13]'` (or [cuda12]) in this
# source tree, from which the package is taken. MPIEXEC is the launcher of its MPI (mpiexec by default). Under SLURM take
# jobs/train_gpu.sbatch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

options=(--config jobs/gpt2_small.toml)
read -r -a data <<< "${DATA:-}"
for path in ${data[@]+"${data[@]}"}; do options+=(--data "$path"); done

if [ "${RANKS:=1}" = 1 ]; then exec "$python" -m mpipipe train "${options[@]}" "$@"; fi
exec "${MPIEXEC:-mpiexec}" -n "$RANKS" "$python" -m mpipipe train "${options[@]}" "$@"
