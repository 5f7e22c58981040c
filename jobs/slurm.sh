# Sourced by jobs/*.sbatch: which Python, one `srun` that ends with its first dead rank, and proof that all went well.
#
#   MPIPIPE_PYTHON       python that has mpipipe; by default the first of .venv-site, .venv, or the one on PATH
#   MPIPIPE_SRUN_FLAGS   what your SLURM and your nodes need, e.g. --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)
#
# Load what your machine offers before you submit, and install mpipipe once into an environment that every node sees:
#   module load python openmpi
#   MPI=site bash jobs/test.sh          makes .venv-site against the loaded MPI, and tests it

cd "${SLURM_SUBMIT_DIR:-.}"
. jobs/restarts.sh
name=${SLURM_JOB_ID:-none}
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || name=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
out=runs/slurm-$name

python=${MPIPIPE_PYTHON:-}
for candidate in .venv-site/bin/python .venv/bin/python; do
    if [ -z "$python" ] && [ -x "$candidate" ]; then python=$candidate; fi
done
python=${python:-python3}
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# When the time of the job is over, for `mpipipe train`: SLURM before 23.02 does not say.
ends=$(squeue --noheader --jobs="${SLURM_JOB_ID:-0}" --format=%e 2> /dev/null || true)
ends=$(date --date="${ends:-unknown}" +%s 2> /dev/null || true)
[ -z "$ends" ] || export SLURM_JOB_END_TIME=$ends

# train FLAGS OF SRUN -- OPTIONS: `mpipipe train` on all tasks of the job, into $out unless an --out is among the options.
# Ends the script: with the status of srun, or with 1 where srun found nothing wrong but the trained weights are missing.
# Where `requeue` is set, a job that has left or failed is put back into the queue, as long as new checkpoints come.
train() {
    local flags=() more=() status=0 start
    while [ "$1" != -- ]; do flags+=("$1"); shift; done
    shift
    out=$(option_of out "$out" "$@")
    read -r -a more <<< "${MPIPIPE_SRUN_FLAGS:-}"
    echo "job $name: ${SLURM_NTASKS:-?} tasks on ${SLURM_JOB_NODELIST:-this node}, $OMP_NUM_THREADS threads each," \
        "$python, commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown)," \
        "start $((${SLURM_RESTART_COUNT:-0} + 1))"
    # MPICH names its shared memory by job and step. What a killed rank has left there stands in the way of the step with
    # the same number, so that each start of a job begins with a higher one.
    for ((start = 0; start < ${SLURM_RESTART_COUNT:-0}; start++)); do srun --nodes=1 --ntasks=1 true || true; done
    trap : TERM  # SLURM sends it to this shell, too: it has to outlive srun
    # a rank that fails must take the others along: without the first two flags they may wait for it until time is over
    srun --kill-on-bad-exit=1 --wait=30 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" ${flags[@]+"${flags[@]}"} \
        ${more[@]+"${more[@]}"} "$python" -m mpipipe train --out "$out" "$@" || status=$?
    # a rank that ends without a word may look like success to srun; model.json is the last file that a training writes
    if [ "$status" = 0 ] && [ ! -f "$out/weights/model.json" ]; then
        echo "srun ended well, but $out/weights/model.json is missing" >&2
        status=1
    fi
    if [ "$status" = 0 ]; then
        date -u +%FT%TZ > "$out/finished"
        rm -f "$out.restarts"
        echo "mpipipe: job $name finished out=$out"
    elif [ -n "${requeue:-}" ] && worth_another_start "$status" "$out/checkpoints" "$out.restarts" && is_running; then
        echo "mpipipe: job $name requeued exit=$status out=$out"
        scontrol requeue "$SLURM_JOB_ID"
    elif [ "$status" = "$preempted" ]; then
        echo "mpipipe: job $name left exit=$status out=$out"
    else
        echo "mpipipe: job $name failed exit=$status out=$out"
    fi
    exit "$status"
}

# whether SLURM still wants this job: one that was cancelled must not come back
is_running() { [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; }
