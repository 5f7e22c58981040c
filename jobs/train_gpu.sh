#!/bin/bash
# Train a byte-level GPT of GPT-2 small's depth and width (12 x 768, sequences of 1024) in bfloat16, a rank on each GPU.
#
#   bash jobs/train_gpu.sh [options of `python -m mpipipe train`]              one GPU
#   RANKS=4 bash jobs/train_gpu.sh --pipe 2                                    two pipelines of two GPUs each
#   DATA="book.txt notes" bash jobs/train_gpu.sh                               your text instead of the default
#   sbatch [--nodes=2 --ntasks=8 --account=...] jobs/train_gpu.sh [options]    under SLURM, RANKS and mpiexec are not used
#
# PYTHON is the interpreter (python3 by default) of an environment made by `pip install '.[cuda13]'` (or [cuda12]) in this
# source tree, from which the package is taken. MPIEXEC is the launcher of its MPI (mpiexec by default), MPIPIPE_SRUN_FLAGS what srun needs for it.
# GPUs are asked for by node, not by task: ranks that see only their own GPU cannot copy to each other's directly.
#
#SBATCH --job-name=mpipipe-train-gpu
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

options=(--device cuda --dtype bfloat16 --dim 768 --layers 12 --heads 12 --seq-len 1024 --batch 64
    --steps 2000 --lr 6e-4 --warmup 200 --eval-every 500)
read -r -a data <<< "${DATA:-}"
for path in ${data[@]+"${data[@]}"}; do options+=(--data "$path"); done

if [ -n "${SLURM_JOB_ID:-}" ]; then
    read -r -a flags <<< "${MPIPIPE_SRUN_FLAGS:-}"
    exec srun --kill-on-bad-exit=1 --wait=30 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --gpu-bind=none \
        ${flags[@]+"${flags[@]}"} "$python" -m mpipipe train --out "runs/slurm-$SLURM_JOB_ID" "${options[@]}" "$@"
fi
if [ "${RANKS:=1}" = 1 ]; then exec "$python" -m mpipipe train "${options[@]}" "$@"; fi
exec "${MPIEXEC:-mpiexec}" -n "$RANKS" "$python" -m mpipipe train "${options[@]}" "$@"
