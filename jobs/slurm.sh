# Sourced by jobs/*.sbatch: which Python, one `srun` that ends with its first dead rank, and proof that all went well.
#
#   MPIPIPE_PYTHON       python that has mpipipe; by default the first of .venv-site, .venv, or the one on PATH
#   MPIPIPE_SRUN_FLAGS   what your SLURM and your nodes need, e.g. --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)
#
# Load what your machine offers before you submit, and install mpipipe once into an environment that every node sees:
#   module load python openmpi
#   MPI=site bash jobs/test.sh          makes .venv-site against the loaded MPI, and tests it

cd "${SLURM_SUBMIT_DIR:-.}"
name=${SLURM_JOB_ID:-none}
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || name=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
out=runs/slurm-$name

python=${MPIPIPE_PYTHON:-}
for candidate in .venv-site/bin/python .venv/bin/python; do
    if [ -z "$python" ] && [ -x "$candidate" ]; then python=$candidate; fi
done
python=${python:-python3}
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# train FLAGS OF SRUN -- OPTIONS: `mpipipe train` on all tasks of the job, into $out unless an --out is among the options.
# Ends the script: with the status of srun, or with 1 where srun found nothing wrong but the trained weights are missing.
train() {
    local flags=() more=() status=0 previous=""
    while [ "$1" != -- ]; do flags+=("$1"); shift; done
    shift
    for option in "$@"; do
        [ "$previous" != --out ] || out=$option
        [ "${option#--out=}" = "$option" ] || out=${option#--out=}
        previous=$option
    done
    read -r -a more <<< "${MPIPIPE_SRUN_FLAGS:-}"
    echo "job $name: ${SLURM_NTASKS:-?} tasks on ${SLURM_JOB_NODELIST:-this node}, $OMP_NUM_THREADS threads each," \
        "$python, commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown)"
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
        echo "mpipipe: job $name finished out=$out"
    else
        echo "mpipipe: job $name failed exit=$status out=$out"
    fi
    exit "$status"
}
