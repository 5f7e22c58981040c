# Sourced by jobs/*.sbatch and jobs/train.pbs: `launch` starts a training, and looks at how it has ended.
#
#   MPIPIPE_PYTHON       python that has mpipipe; by default the first of .venv-site, .venv, or the one on PATH
#   MPIPIPE_SRUN_FLAGS   what your SLURM and your nodes need, e.g. --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)

. jobs/restarts.sh
python=${MPIPIPE_PYTHON:-}
for candidate in .venv-site/bin/python .venv/bin/python; do
    if [ -z "$python" ] && [ -x "$candidate" ]; then python=$candidate; fi
done
python=${python:-python3}
threads=${SLURM_CPUS_PER_TASK:-${NCPUS:-1}}  # of each rank
export MPIPIPE_THREADS="$threads" OMP_NUM_THREADS="$threads" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
read -r -a srun_flags <<< "${MPIPIPE_SRUN_FLAGS:-}"
requeue=""    # yes: a job that has left or failed starts again, as long as new checkpoints come

if [ -n "${SLURM_JOB_ID:-}" ]; then
    name=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    out=runs/slurm-$name
    # when the time of the job is over, for `mpipipe train`: SLURM before 23.02 does not say
    ends=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2> /dev/null || true)
    ends=$(date --date="${ends:-unknown}" +%s 2> /dev/null || true)
    [ -z "$ends" ] || export SLURM_JOB_END_TIME=$ends
else
    name=${PBS_JOBID:-none}
    name=${name%%[.[]*}${PBS_ARRAY_INDEX:+_$PBS_ARRAY_INDEX}
    out=runs/pbs-$name
fi

# launch COMMAND...: run a training on all ranks of the job, into $out unless an --out is among the words. Ends the
# script: with 0 only where the command returns 0 and the training has left a new file `finished`.
launch() {
    local status=0 before
    out=$(option_of out "$out" "$@")
    before=$(end_in "$out")
    echo "job $name: ${SLURM_NTASKS:-all} tasks on ${SLURM_JOB_NODELIST:-this node}, $threads threads each, $python," \
        "commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown), start $((${SLURM_RESTART_COUNT:-0} + 1))"
    pass_dirty_steps
    unset SLURM_EXPORT_ENV  # set by sbatch --export=NONE: srun would hand on nothing of what is set here
    trap : TERM USR2  # the scheduler sends them to this shell, too: it goes on until the job has left
    "$@" || status=$?
    if [ "$status" = 0 ]; then is_finished "$out" "$before" "$1" || status=1; fi
    if [ "$status" = 0 ]; then
        rm -f -- "$out.restarts"
        echo "mpipipe: job $name finished out=$out"
    elif [ -n "$requeue" ] && worth_another_start "$status" "$out/checkpoints" "$out.restarts" && is_wanted; then
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
is_wanted() {
    [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]
}

# MPICH names its shared memory by job and step. What a killed rank has left there stands in the way of the step with the
# same number, so that each start of a job of SLURM begins with a higher one.
pass_dirty_steps() {
    local start
    for ((start = 0; start < ${SLURM_RESTART_COUNT:-0}; start++)); do srun --nodes=1 --ntasks=1 true || true; done
}
