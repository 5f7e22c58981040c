"""Start a real MPI job from inside a test, also when pytest itself runs under mpiexec."""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from mpipipe.bench.results import environment_of_own_job

ROOT = Path(__file__).resolve().parents[2]
# families of variables that hold settings too; a job of a test sees none of the caller's
SETTINGS = ("OMPI_", "PRTE_", "SLURM_")
FAST_START = {"OMPI_MCA_btl": "^ofi"}  # probing libfabric costs Open MPI a second at every start
SESSIONS = "PRTE_MCA_prte_tmpdir_base"  # where Open MPI's launcher keeps its files
MARK = "TEST_JOB_MARK"  # a variable that every process of a job inherits
POLITE_SECONDS = 5  # that a launcher gets to take its ranks along
_sessions: tuple[int, str] | None = None  # this process, and the folder of all its session folders


class JobTimeoutError(AssertionError):
    """A job did not end in time; the text holds what it had printed."""


def job_environment(extra=None) -> dict:
    """This process's environment without its launcher's variables, plus what each MPI needs on a small machine."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    env = environment_of_own_job(variables) | FAST_START
    env.pop("PYTHONUNBUFFERED", None)  # whole lines: the launcher mixes what the ranks write
    env.pop("MPIPIPE_TEST_DURATIONS", None)  # a session of pytest within a test keeps no times
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return {**env, SESSIONS: session_folder(), **(extra or {})}


def session_folder() -> str:
    """A new folder for what Open MPI's launcher keeps while it runs.

    It names its files by its process id and leaves them behind where it is killed. In a shared folder a later launcher
    that gets the same process id does not start ("The PMIx server's listener thread failed to start").
    """
    global _sessions
    if _sessions is None or _sessions[0] != os.getpid():
        _sessions = os.getpid(), tempfile.mkdtemp(prefix="mpipipe-sessions-")
        atexit.register(shutil.rmtree, _sessions[1], ignore_errors=True)
    return tempfile.mkdtemp(dir=_sessions[1])


def mpiexec(python=sys.executable) -> str:
    """The launcher that belongs to a Python environment; for this process's own, MPIEXEC names another one."""
    named = os.environ.get("MPIEXEC", "") if str(python) == sys.executable else ""
    if named:
        found = shutil.which(os.path.abspath(named) if os.sep in named else named)  # a job has a folder of its own
        if found is None:
            raise FileNotFoundError(f"MPIEXEC={named} is no command")
        return found
    beside = Path(python).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError(
            "no mpiexec beside python or on PATH: pip install '.[mpich]' in this checkout, or load an MPI module"
        )
    return found


class Job:
    """A job under way: its launcher, whose `returncode` is None while it runs, what it prints, and its processes.

    Output goes to files, so that a rank which outlives its launcher keeps nobody waiting.
    """

    def __init__(self, command, folder, env=None):
        self.command = [str(part) for part in command]
        self._mark = uuid.uuid4().hex
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._launcher = subprocess.Popen(
            self.command,
            cwd=folder,
            env={**job_environment(env), MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    @property
    def returncode(self):
        return self._launcher.poll()

    @property
    def stdout(self) -> str:
        return _text(self._out)

    @property
    def stderr(self) -> str:
        return _text(self._err)

    def wait(self, seconds) -> bool:
        """Whether the launcher ends within so many seconds."""
        try:
            self._launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def processes(self) -> dict[int, dict[str, str]]:
        """Environment of each living process of this job, by process id; only on Linux, empty elsewhere."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                data = (entry / "environ").read_bytes()
            except OSError:  # gone, or another user's
                continue
            if self._mark.encode() in data:
                pairs = (item.partition("=") for item in data.decode(errors="replace").split("\0"))
                found[int(entry.name)] = {name: value for name, _, value in pairs}
        return found

    def send(self, number, to):
        """Send a signal to "launcher", to "group" (the launcher's, as a terminal does), or to the process `to`."""
        try:
            if to == "group":
                os.killpg(self._launcher.pid, number)
            else:
                os.kill(self._launcher.pid if to == "launcher" else to, number)
        except ProcessLookupError:  # it ended meanwhile
            pass

    def end(self):
        """Stop the launcher politely, so that it takes its ranks along, and kill what is left."""
        self._launcher.terminate()
        if not self.wait(POLITE_SECONDS):
            self._launcher.kill()
        self.kill_processes()
        self.wait(POLITE_SECONDS)

    def kill_processes(self):
        """Kill the processes of this job that still live."""
        for pid in self.processes():
            self.send(signal.SIGKILL, pid)

    def outlived_by(self, seconds) -> dict[int, dict[str, str]]:
        """As `processes`, of what still lives so many seconds after the launcher ended."""
        stop = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < stop:
            time.sleep(0.05)
        return left


def _text(file) -> str:
    size = os.fstat(file.fileno()).st_size  # pread: the job writes at the offset that it shares with this file
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def run_job(ranks, what, timeout=60, env=None, options=()) -> subprocess.CompletedProcess:
    """Run `mpiexec -n ranks python ...` in an empty folder; JobTimeoutError after `timeout` seconds.

    `what` is the text of a script, or a list of arguments for python; `env` is set on top of a clean environment;
    `options` are for the launcher. With 0 ranks python runs without a launcher.
    """
    with tempfile.TemporaryDirectory(prefix="mpipipe-job-") as folder:
        if isinstance(what, str):
            script = Path(folder, "job.py")
            script.write_text(what)
            what = [script]
        command = [sys.executable, *what]
        if ranks:
            command = [mpiexec(), *options, "-n", ranks, *command]
        job = Job(command, folder, env)
        if not job.wait(timeout):
            job.end()
            text = f"{' '.join(job.command)}: still running after {timeout} s\n{job.stdout}\n{job.stderr}"
            raise JobTimeoutError(text)
        return subprocess.CompletedProcess(job.command, job.returncode, job.stdout, job.stderr)
