"""What a job asks its scheduler for: the lines at the head of its script."""

from __future__ import annotations

from mpipipe.site.job import Job


def directives(job: Job) -> list[str]:
    """Return the lines of the head, each a comment that the scheduler reads."""
    prefix, lines = {"slurm": _slurm, "pbs": _pbs, "lsf": _lsf, "flux": _flux}[job.scheduler](job)
    return [f"{prefix} {line}" for line in lines]


def _slurm(job: Job) -> tuple[str, list[str]]:
    lines = [f"--job-name={job.job_name}"]
    if job.account:
        lines.append(f"--account={job.account}")
    if job.queue:
        lines.append(f"--partition={job.queue}")
    if job.array:
        lines.append(f"--array={job.array}")
    lines += [f"--nodes={job.nodes}", f"--ntasks-per-node={job.ranks_per_node}"]
    if job.gpus:
        # by node, not by task: ranks that see only their own GPU cannot copy to each other's directly
        lines.append(f"--gpus-per-node={job.ranks_per_node}")
    lines.append(f"--cpus-per-task={job.threads}")
    if job.nodes > 1:
        lines.append("--distribution=block:block")
    lines.append(f"--time={job.clock}")
    if job.preemptable:
        lines.append(f"--signal=USR2@{job.notice}")
    lines += [f"--output=slurm-{'%A_%a' if job.array else '%j'}.out", "--open-mode=append"]
    return "#SBATCH", [*lines, "--requeue" if job.preemptable else "--no-requeue"]


def _pbs(job: Job) -> tuple[str, list[str]]:
    cores = job.ranks_per_node * job.threads
    chunk = f"select={job.nodes}:ncpus={cores}:mpiprocs={job.ranks_per_node}:ompthreads={job.threads}"
    lines = [f"-N {job.job_name}"]
    if job.account:
        lines.append(f"-A {job.account}")
    if job.queue:
        lines.append(f"-q {job.queue}")
    if job.array:
        lines.append(f"-J {job.array}")
    lines.append(f"-l {chunk}" + (f":ngpus={job.ranks_per_node}" if job.gpus else ""))
    lines += ["-l place=scatter", f"-l walltime={job.clock}", "-j oe"]
    return "#PBS", [*lines, f"-r {'y' if job.preemptable or job.array else 'n'}"]  # an array has to be rerunnable


def _lsf(job: Job) -> tuple[str, list[str]]:
    lines = [f'-J "{job.job_name}[{job.array}]"' if job.array else f"-J {job.job_name}"]
    if job.account:
        lines.append(f"-P {job.account}")
    if job.queue:
        lines.append(f"-q {job.queue}")
    if job.launcher == "jsrun":
        lines.append(f"-nnodes {job.nodes}")
    else:
        cores = job.ranks_per_node * job.threads  # a slot is a core, as a rule
        lines += [f"-n {job.nodes * cores}", f'-R "span[ptile={cores}]"']
        if job.gpus:
            lines.append(f'-gpu "num={job.ranks_per_node}"')
    minutes = -(-job.seconds // 60)
    lines.append(f"-W {minutes // 60:02}:{minutes % 60:02}")
    if job.preemptable:
        # MPICH's mpiexec hands on TERM and dies of USR2; that of Open MPI kills its ranks 0.2 s after TERM
        lines += [f"-wa {'USR2' if job.mpi == 'openmpi' or job.launcher == 'jsrun' else 'TERM'}"]
        lines += [f"-wt {-(-job.notice // 60)}", '-Q "75"']
    return "#BSUB", [*lines, f"-o lsf-{'%J_%I' if job.array else '%J'}.out"]


def _flux(job: Job) -> tuple[str, list[str]]:
    lines = [f"--job-name={job.job_name}"]
    if job.account:
        lines.append(f"--bank={job.account}")
    if job.queue:
        lines.append(f"--queue={job.queue}")
    lines += [f"--nodes={job.nodes}", "--exclusive", f"--time-limit={job.seconds}s"]
    return "# flux:", [*lines, "--output=flux-{{id}}.out"]
