"""What a user gives stands in a job script as words and as nothing else, whatever characters it has."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.harness import AT_LENGTH
from support.launch import job_environment

from mpipipe.cli.jobscripts import ARRAYS, LIBRARY, SCHEDULERS, Job, job_script
from mpipipe.errors import ArgumentError

pytestmark = pytest.mark.jobs
PROGRAMS = ("module", "srun", "mpiexec", "flux", "squeue", "scontrol")
PREFIX = {"slurm": "#SBATCH ", "pbs": "#PBS ", "lsf": "#BSUB ", "flux": "# flux: "}
# writes down how many words, its name, and the words, a zero byte behind each; the launcher of ranks ends with 3
RECORDING = """#!/bin/bash
printf '%s\\0' "$#" "${0##*/}" "$@" >> "$RECORD"
case "${0##*/} $1" in "flux job" | "flux getattr") echo 7 ;; srun* | mpiexec* | "flux run") exit 3 ;; esac
"""
# says where the shell functions of the package are, or starts what stands behind --
PYTHON = f"""#!/bin/bash
if [ "$1" = -c ]; then echo {LIBRARY}; exit; fi
while [ "$1" != -- ]; do shift; done; shift; exec "$@"
"""
NASTY = st.text("'\"$`;&|<>(){}[]*?!#~\\ \n\t\r\0=-%@,:.abé٣\u2028\u00a0", max_size=12)
WORDS = NASTY | st.text(max_size=12) | st.sampled_from(["$(touch PWNED)", "x;{touch,PWNED}", "'\"`touch PWNED`", "-n"])


def printed(text):
    """Whether a line of a script can hold it."""
    return len(text.splitlines()) < 2 and not {"Cc", "Cs"} & set(map(unicodedata.category, text))


def run(text, scheduler):
    """The exit code of a script, all programs with their words, and the files that it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        place, tools = Path(folder, "place"), Path(folder, "tools")
        place.mkdir()
        shutil.copytree(STAND_INS, tools)
        (place / "script").write_text(text)
        env = job_environment({"RECORD": f"{folder}/record", "PATH": f"{tools}:/usr/bin:/bin", "PBS_JOBID": "7"})
        env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1"}
        done = subprocess.run(["bash", "script"], cwd=place, env=env, capture_output=True, timeout=60)
        record, calls = Path(folder, "record").read_bytes().decode().split("\0")[:-1], []
        while record:
            count = int(record.pop(0)) + 1
            calls.append(record[:count])
            del record[:count]
        return done, calls, sorted(path.name for path in place.iterdir())


STAND_INS = None


@pytest.fixture(scope="module", autouse=True)
def stand_ins(tmp_path_factory):
    global STAND_INS
    STAND_INS = tmp_path_factory.mktemp("tools")
    for name, text in {**dict.fromkeys(PROGRAMS, RECORDING), "its python'": PYTHON}.items():
        (STAND_INS / name).write_text(text)
        (STAND_INS / name).chmod(0o755)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("kind", ["options", "script"])
@settings(max_examples=400 if AT_LENGTH else 8, deadline=None, database=None)
@given(words=st.lists(WORDS, min_size=1, max_size=4), modules=st.lists(WORDS, max_size=2), named=WORDS)
@example(words=["$(touch PWNED)", "x;{touch,PWNED}", "a'b", "flux: -N9"], modules=["x;{touch,PWNED}"], named="abc")
def test_a_shell_sees_nothing_but_words(scheduler, kind, words, modules, named):
    wanted = {kind: tuple(words), "modules": tuple(modules), "python": "its python'", "ranks_per_node": 2}
    try:
        job = Job(scheduler, mpi="mpich", **wanted)
    except ArgumentError:
        modular = [re.fullmatch(r"[^\s'\"\\$`#-][^\s'\"\\$`#]*", each) and printed(each) for each in modules]
        assert not all(map(printed, words)) or not all(modular)
        return
    done, programs, left = run(job_script(job), scheduler)
    assert done.returncode == 3, (done, job_script(job))
    launched = next(call for call in programs if call[0] in ("srun", "mpiexec") or call[:2] == ["flux", "run"])
    own = launched.index("its python'")
    program = {"options": ["-m", "mpipipe", "train", "--out"], "script": ["-m", "mpipipe", "run"]}[kind]
    assert launched[own + 1 : own + 1 + len(program)] == program
    assert launched[-len(words) :] == words
    assert kind == "options" or len(launched) == own + 1 + len(program) + len(words)
    assert [call[1:] for call in programs if call[0] == "module"] == [["load", each] for each in modules]
    assert set(left) <= {"script", "runs"} or any(word.startswith("--out") for word in words)
    assert b"not found" not in done.stderr and b"syntax" not in done.stderr
    lines = job_script(job).splitlines()
    assert all(re.match(r"[^\w]*flux:", line, re.IGNORECASE) is None for line in lines if line[0:1] != "#")


@settings(max_examples=1000 if AT_LENGTH else 200, deadline=None, database=None)
@given(
    scheduler=st.sampled_from(SCHEDULERS),
    what=st.sampled_from(["account", "queue", "name", "array", "time"]),
    text=WORDS | st.from_regex(r"\d{1,3}-\d{1,3}", fullmatch=True),
)
@example(scheduler="slurm", what="array", text="٣-٤")
@example(scheduler="slurm", what="account", text="abc 123\n#SBATCH --nodes=9")
def test_a_directive_has_one_word_of_ascii(scheduler, what, text):
    try:
        job = Job(scheduler, **{what: text})
    except ArgumentError:
        return
    if what == "name" and not text:  # none is given
        return
    head = [line for line in job_script(job).splitlines() if line.startswith(PREFIX[scheduler])]
    plain = [line for line in job_script(Job(scheduler)).splitlines() if line.startswith(PREFIX[scheduler])]
    assert len(head) - len(plain) == (
        what in ("account", "queue") or (what == "array" and scheduler in ("slurm", "pbs"))
    )
    assert "".join(head).isascii() and "".join(head).isprintable()
    if what != "time":
        assert re.fullmatch(r"[\w.,:/@%+=~^-]+", text, re.ASCII) and sum(text in line for line in head) >= 1


def test_arrays_take_digits_that_schedulers_take():
    assert ARRAYS
    for text in ("٣-٤", "1-2\n", " 1-2", "1-٤", "\uff11-\uff12"):
        with pytest.raises(ArgumentError, match="first-last"):
            Job("slurm", array=text)
