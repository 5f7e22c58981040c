"""The text of a job script: head, environment, and one line that starts the ranks."""

from __future__ import annotations

import shlex
from pathlib import Path
from string import Template

from mpipipe.cli.jobscripts.job import Job

LIBRARY = Path(__file__).with_name("job.sh")
SUBMIT = {
    "slurm": "sbatch FILE [OPTIONS]",
    "pbs": "qsub FILE",
    "lsf": "bsub < FILE",
    "flux": "flux batch FILE [OPTIONS]",
}
CHAIN = {"pbs": "qsub -W depend=afterany:JOBID FILE", "flux": "flux batch --dependency=afterany:JOBID FILE"}
FOLDER = {"slurm": "${SLURM_SUBMIT_DIR:-.}", "pbs": "${PBS_O_WORKDIR:-.}", "lsf": "${LS_SUBCWD:-.}", "flux": "."}
SEED = {"slurm": "SLURM_ARRAY_TASK_ID", "pbs": "PBS_ARRAY_INDEX", "lsf": "LSB_JOBINDEX"}
PLUGIN = {"mpich": "pmi2", "openmpi": "pmix", "cray": "cray_shasta"}  # of srun, for each MPI
SIZES_OF_SLURM = "nodes=$SLURM_JOB_NUM_NODES ranks=$SLURM_NTASKS threads=$SLURM_CPUS_PER_TASK"


def job_script(job: Job) -> str:
    """Return the text of a bash script for `job`, which its scheduler takes as it is, and which is fit to edit.

    Examples
    --------
    >>> from mpipipe.cli.jobscripts import Job, job_script
    >>> text = job_script(Job("slurm", nodes=2, ranks_per_node=4, mpi="openmpi"))
    >>> [line for line in text.splitlines() if line.startswith("#SBATCH --n")]
    ['#SBATCH --nodes=2', '#SBATCH --ntasks-per-node=4', '#SBATCH --no-requeue']
    """
    template = Template(Path(__file__).with_name("job_script.template").read_text())
    sizes = f"nodes={job.nodes} ranks={job.ranks} threads={job.threads}"
    return template.substitute(
        notes="\n".join(f"# {line}".rstrip() for line in _notes(job)),
        directives="\n".join(directives(job)),
        folder=FOLDER[job.scheduler],
        modules="\n".join(f"module load {shlex.quote(module)}" for module in job.modules)
        or "# module load python openmpi",
        python=shlex.quote(job.python),
        scheduler=job.scheduler,
        sizes=SIZES_OF_SLURM if job.scheduler == "slurm" else sizes,
        requeue="yes" if job.preemptable else "",
        out=_folder_of_chain(job),
        launcher=" ".join(_launcher(job)),
        program=" \\\n    ".join(_program(job)),
    )


def _notes(job: Job) -> list[str]:
    """Return what a reader of the script has to know."""
    size = f"{job.ranks} rank{'s' * (job.ranks > 1)} of mpipipe on {job.nodes} node{'s' * (job.nodes > 1)}"
    lines = [f"{size}; submit it with: {SUBMIT[job.scheduler]}"]
    if job.scheduler in ("slurm", "flux"):
        what = "more arguments of the script." if job.script else "those of `mpipipe train`, and win over those below."
        lines.append(f"OPTIONS are {what}")
    if job.scheduler != "slurm":
        lines.append("Where you change the sizes in the head, change those below, too.")
    if job.preemptable and job.script:
        lines += [
            "The script has to save before its time is over, to leave with 75 (mpipipe.Preemption), and to go on from",
            "what is in $out/checkpoints, or in the folder that the variable CHECKPOINTS names.",
        ]
    if job.preemptable and job.scheduler in CHAIN:
        lines += [
            "It saves before its time is over and leaves with 75. Submit it several times, each job after the last:",
            f"  {CHAIN[job.scheduler]}",
            "Each goes on where the one before it left, and one that finds the training finished ends at once.",
        ]
    elif job.preemptable:
        lines.append("It saves before its time is over, leaves with 75, and comes back until it is done.")
    return lines


def _folder_of_chain(job: Job) -> str:
    """Return the line that names one folder for all jobs of a chain; empty if there is no chain."""
    if not job.preemptable or job.scheduler not in CHAIN:
        return ""
    return f"out=runs/{job.job_name}" + (f"_${SEED[job.scheduler]}\n" if job.array else "\n")


def _launcher(job: Job) -> list[str]:
    """Return the words that start the ranks, in front of Python."""
    per_node = job.ranks_per_node
    if job.scheduler == "slurm":
        gpus = ["--gpu-bind=none"] if job.gpus else []
        plugin = f"--mpi={PLUGIN[job.mpi]}"
        # a rank that fails must take the others along: else they may wait for it until time is over. srun has not
        # inherited --cpus-per-task from the job since SLURM 22.05
        placed = ['--cpus-per-task="$threads"', "--cpu-bind=cores"]
        return ["srun", "--kill-on-bad-exit=1", "--wait=30", *placed, *gpus, plugin]
    if job.scheduler == "flux":
        gpus = ["--gpus-per-task=1"] if job.gpus else []
        placed = ["-o", "cpu-affinity=per-task", "-o", "exit-on-error"]
        return ["flux", "run", '--nodes="$nodes"', '--ntasks="$ranks"', '--cores-per-task="$threads"', *gpus, *placed]
    if job.launcher == "jsrun":  # one resource set for each node: one with a single GPU hides the others
        gpus = ["-g", str(per_node)] if job.gpus else []
        cores = str(per_node * job.threads)
        return ["jsrun", "-n", '"$nodes"', "-a", str(per_node), "-c", cores, *gpus, "-b", 'packed:"$threads"']
    words = {  # what the mpiexec of each MPI calls ranks for each node, and cores for each rank
        "openmpi": f'--map-by ppr:{per_node}:node:PE="$threads" --bind-to core',
        "cray": f'--ppn {per_node} --depth "$threads" --cpu-bind depth',
        "mpich": f'-ppn {per_node} -bind-to core:"$threads"',
    }
    return f'mpiexec -n "$ranks" {words[job.mpi]}'.split()


def _program(job: Job) -> list[str]:
    """Return the words for Python, a line each: a training and its options, or a script and its arguments.

    No line begins with a word that a user gives: Flux takes a line for a directive that begins with flux: in quotes.
    """
    if job.script:
        return [f"-m mpipipe run {shlex.join(job.script)}", '"$@"']
    return ['-m mpipipe train --out "$out"', *_options(job), '"$@"']


def _options(job: Job) -> list[str]:
    """Return the options of `mpipipe train`, a line each."""
    pipe = '--pipe "$nodes"' if job.nodes > 1 or job.long_context else '--pipe "$ranks"'
    lines = [f"--seq {job.ranks_per_node} {pipe} --seq-len 65536 --batch 8 --recompute" if job.long_context else pipe]
    if job.array:
        lines.append(f'--seed "${SEED[job.scheduler]}"')
    if job.preemptable:
        lines.append("--save-every 100 --resume auto")
    if job.scheduler != "slurm":  # which alone says when the time is over
        lines.append(f'--time-limit "$(({job.seconds} - SECONDS))"')
    if job.options:
        lines[-1] += f" {shlex.join(job.options)}"
    return lines


# -- What a job asks its scheduler for: the lines at the head of its script -------------------------------------------


HEAD = {  # what each directive begins with, and the words for an account and a queue
    "slurm": ("#SBATCH", "--account=", "--partition="),
    "pbs": ("#PBS", "-A ", "-q "),
    "lsf": ("#BSUB", "-P ", "-q "),
    "flux": ("# flux:", "--bank=", "--queue="),
}


def directives(job: Job) -> list[str]:
    """Return the lines of the head, each a comment that the scheduler reads."""
    name, *lines = {"slurm": _slurm, "pbs": _pbs, "lsf": _lsf, "flux": _flux}[job.scheduler](job)
    prefix, account, queue = HEAD[job.scheduler]
    asked = [f"{account}{job.account}" if job.account else "", f"{queue}{job.queue}" if job.queue else ""]
    return [f"{prefix} {line}" for line in (name, *asked, *lines) if line]


def _slurm(job: Job) -> list[str]:
    return [
        f"--job-name={job.job_name}",
        f"--array={job.array}" if job.array else "",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        # by node, not by task: ranks that see only their own GPU cannot copy to each other's directly
        f"--gpus-per-node={job.ranks_per_node}" if job.gpus else "",
        f"--cpus-per-task={job.threads}",
        "--distribution=block:block" if job.nodes > 1 else "",
        f"--time={job.clock}",
        f"--signal=USR2@{job.notice}" if job.preemptable else "",
        f"--output=slurm-{'%A_%a' if job.array else '%j'}.out",
        "--open-mode=append",
        "--requeue" if job.preemptable else "--no-requeue",
    ]


def _pbs(job: Job) -> list[str]:
    cores = job.ranks_per_node * job.threads
    chunk = f"select={job.nodes}:ncpus={cores}:mpiprocs={job.ranks_per_node}:ompthreads={job.threads}"
    return [
        f"-N {job.job_name}",
        f"-J {job.array}" if job.array else "",
        f"-l {chunk}" + (f":ngpus={job.ranks_per_node}" if job.gpus else ""),
        "-l place=scatter",
        f"-l walltime={job.clock}",
        "-j oe",
        f"-r {'y' if job.preemptable or job.array else 'n'}",  # an array has to be rerunnable
    ]


def _lsf(job: Job) -> list[str]:
    lines = [f'-J "{job.job_name}[{job.array}]"' if job.array else f"-J {job.job_name}"]
    if job.launcher == "jsrun":
        lines.append(f"-nnodes {job.nodes}")
    else:
        cores = job.ranks_per_node * job.threads  # a slot is a core, as a rule
        lines += [f"-n {job.nodes * cores}", f'-R "span[ptile={cores}]"']
        lines += [f'-gpu "num={job.ranks_per_node}"'] if job.gpus else []
    minutes = -(-job.seconds // 60)
    lines.append(f"-W {minutes // 60:02}:{minutes % 60:02}")
    if job.preemptable:
        # MPICH's mpiexec hands on TERM and dies of USR2; that of Open MPI kills its ranks 0.2 s after TERM
        lines += [f"-wa {'USR2' if job.mpi == 'openmpi' or job.launcher == 'jsrun' else 'TERM'}"]
        lines += [f"-wt {-(-job.notice // 60)}", '-Q "75"']
    return [*lines, f"-o lsf-{'%J_%I' if job.array else '%J'}.out"]


def _flux(job: Job) -> list[str]:
    sizes = [f"--nodes={job.nodes}", "--exclusive", f"--time-limit={job.seconds}s"]
    return [f"--job-name={job.job_name}", *sizes, "--output=flux-{{id}}.out"]
