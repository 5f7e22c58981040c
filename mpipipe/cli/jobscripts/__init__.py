"""What a computing centre needs: job scripts for its scheduler, and the shell functions that they share. No MPI."""

from mpipipe.cli.jobscripts.job import ARRAYS, MPIS, SCHEDULERS, Job
from mpipipe.cli.jobscripts.script import LIBRARY, job_script

__all__ = ["ARRAYS", "LIBRARY", "MPIS", "SCHEDULERS", "Job", "job_script"]
