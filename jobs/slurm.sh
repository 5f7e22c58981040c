# Sourced by jobs/*.sbatch: which Python of this checkout, and one `srun` that ends with its first dead rank. How a job
# ends, and what proves that it has ended well, is in mpipipe/cli/jobscripts/job.sh.
#
#   MPIPIPE_PYTHON       python that has mpipipe; by default the first of .venv-site, .venv, or the one on PATH
#   MPIPIPE_SRUN_FLAGS   what your SLURM and your nodes need, e.g. --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)
#
# Load what your machine offers before you submit, and install mpipipe once into an environment that every node sees:
#   module load python openmpi
#   MPI=site bash jobs/test.sh          makes .venv-site against the loaded MPI, and tests it

cd "${SLURM_SUBMIT_DIR:-.}"
python=${MPIPIPE_PYTHON:-}
for candidate in .venv-site/bin/python .venv/bin/python; do
    if [ -z "$python" ] && [ -x "$candidate" ]; then python=$candidate; fi
done
python=${python:-python3}
scheduler=slurm ranks=${SLURM_NTASKS:-?} threads=${SLURM_CPUS_PER_TASK:-1}
export MPIPIPE_THREADS="$threads" OMP_NUM_THREADS="$threads" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
. mpipipe/cli/jobscripts/job.sh

# train FLAGS OF SRUN -- OPTIONS: `mpipipe train` on all tasks of the job. Ends the script.
train() {
    local flags=() more=()
    while [ "$1" != -- ]; do flags+=("$1"); shift; done
    shift
    read -r -a more <<< "${MPIPIPE_SRUN_FLAGS:-}"
    # a rank that fails must take the others along: without the first two flags they may wait for it until time is over
    launch srun --kill-on-bad-exit=1 --wait=30 --cpus-per-task="$threads" --cpu-bind=cores ${flags[@]+"${flags[@]}"} \
        ${more[@]+"${more[@]}"} "$python" -m mpipipe train --out "$out" "$@"
}
