#!/usr/bin/env bash
# Train on sequences of 8192 bytes of real text, each shared by two ranks of a ring in each of two pipeline stages
# (four ranks, pipe 2 x seq 2), then take the same steps with whole sequences, and compare the losses.
#
#   bash jobs/train_long_context.sh [options of `python -m mpipipe train`]
#   STEPS=20 MPI=openmpi bash jobs/train_long_context.sh      (variables: see jobs/common.sh)
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi
install_package
configure_mpi

out=runs/long-context-$(date +%Y%m%d-%H%M%S)
options=(--seq-len 8192 --batch 4 --microbatches 4 --dim 64 --layers 4 --heads 2 --steps "${STEPS:-6}" --warmup 2
    --log-every 1 --eval-batches 1 --sample-bytes 0 "$@")
"$mpiexec" -n 4 "$python" -m mpipipe train --pipe 2 --seq 2 --out "$out/sharded" "${options[@]}"
"$mpiexec" -n 2 "$python" -m mpipipe train --pipe 2 --seq 1 --out "$out/whole" "${options[@]}"
exec "$python" jobs/compare_losses.py "long context" "$out/sharded" "$out/whole"
