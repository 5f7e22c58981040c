# Sourced by the job scripts that `mpipipe jobscript` prints, and by jobs/*.sbatch: `launch` starts one training, or one
# script, by `mpipipe launch`, which proves that all went well, and ends the job script. That sets before:
#
#   scheduler        slurm, pbs, lsf or flux
#   python           with which the ranks are started
#   ranks, threads   how many ranks, and cores of each
#   requeue=yes      a job that has left or failed starts again, as long as new checkpoints come; empty for none
#
# It finds `name`, the job's number, and `out`, the folder of the training; a script may choose another one.

. "$(dirname "${BASH_SOURCE[0]}")/restarts.sh"

case $scheduler in
    slurm)
        name=${SLURM_JOB_ID:-none}
        [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || name=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
        # When the time of the job is over, for `mpipipe train`: SLURM before 23.02 does not say.
        ends=$(squeue --noheader --jobs="${SLURM_JOB_ID:-0}" --format=%e 2> /dev/null || true)
        ends=$(date --date="${ends:-unknown}" +%s 2> /dev/null || true)
        [ -z "$ends" ] || export SLURM_JOB_END_TIME=$ends
        ;;
    pbs)
        name=${PBS_JOBID:-none}
        name=${name%%[.[]*}${PBS_ARRAY_INDEX:+_$PBS_ARRAY_INDEX}
        ;;
    lsf)
        name=${LSB_JOBID:-none}
        [ "${LSB_JOBINDEX:-0}" = 0 ] || name=${name}_$LSB_JOBINDEX
        ;;
    flux) name=$(flux job id --to=dec "$(flux getattr jobid)") ;;
esac
out=runs/$scheduler-$name

# launch COMMAND...: run a training on all ranks of the job, into $out unless an --out is among the words of the command.
# Ends the script: with the status of the command, or with 1 where that is 0 and no rank has left the proof of the end,
# which lies next to $out meanwhile. Checkpoints are in $out/checkpoints, or in the folder that CHECKPOINTS names.
launch() {
    local status=0 start="" around
    out=$(option_of out "$out" "$@")
    if [ -n "${requeue:-}" ] && [ -e "$out/finished" ]; then
        echo "mpipipe: job $name has nothing to do: $out is finished"
        exit 0
    fi
    [ "$scheduler" != slurm ] || start=", start $((${SLURM_RESTART_COUNT:-0} + 1))"
    echo "job $name: $ranks tasks on ${SLURM_JOB_NODELIST:-this node}, $threads threads each," \
        "$python, commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown)$start"
    [ "$scheduler" != slurm ] || pass_dirty_steps
    unset SLURM_EXPORT_ENV  # set by sbatch --export=NONE: srun would hand on nothing of what is set here
    trap : TERM USR2  # the scheduler sends them to this shell, too: it has to outlive the job
    around=$(dirname -- "$out")
    mkdir -p -- "$around"
    "$python" -m mpipipe launch --marker-folder "$around" -- "$@" || status=$?
    if [ "$status" = 0 ]; then
        mkdir -p -- "$out"
        date -u +%FT%TZ > "$out/finished"
        rm -f -- "$out.restarts"
        echo "mpipipe: job $name finished out=$out"
    elif [ -n "${requeue:-}" ] && worth_another_start "$status" "${CHECKPOINTS:-$out/checkpoints}" "$out.restarts" && is_wanted; then
        start_again "$status"
    elif [ "$status" = "$preempted" ]; then
        echo "mpipipe: job $name left exit=$status out=$out"
    else
        echo "mpipipe: job $name failed exit=$status out=$out"
    fi
    exit "$status"
}

# start_again STATUS: put the job back into the queue, where its scheduler can
start_again() {
    case $scheduler in
        slurm)
            echo "mpipipe: job $name requeued exit=$1 out=$out"
            scontrol requeue "$SLURM_JOB_ID"
            ;;
        lsf)
            echo "mpipipe: job $name requeued exit=$1 out=$out"
            exit "$preempted"  # `#BSUB -Q 75` is what brings it back
            ;;
        *) echo "mpipipe: job $name left exit=$1 out=$out; the next job of the chain goes on there" ;;
    esac
}

# whether SLURM still wants this job: one that was cancelled must not come back
is_wanted() {
    [ "$scheduler" != slurm ] || [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]
}

# MPICH names its shared memory by job and step. What a killed rank has left there stands in the way of the step with the
# same number, so that each start of a job of SLURM begins with a higher one.
pass_dirty_steps() {
    local start
    for ((start = 0; start < ${SLURM_RESTART_COUNT:-0}; start++)); do srun --nodes=1 --ntasks=1 true || true; done
}
