"""The watchdog in jobs of their own: which rank a report names, and that healthy jobs are left alone."""

import re
import signal
import sys
import time

import pytest
from faults.blocks import OPENING, on
from faults.fault import HEADING
from support.launch import Job, mpiexec

HUNG = 124
TWO_STEPS = """
with build() as pipeline:
    pipeline.step(inputs, targets)
    breaking(pipeline)
    pipeline.step(inputs, targets)
print("finished", flush=True)
"""


@pytest.fixture
def play(allow_seconds, tmp_path):
    """play(script, ranks, watchdog, meanwhile): the job at its end; none of its processes may outlive it."""

    def start(body, ranks=2, watchdog=1.5, meanwhile=lambda job: None, opening=OPENING, run=True, env=None):
        allow_seconds(120)
        script = tmp_path / "job.py"
        script.write_text(opening + body)
        command = [mpiexec(), "-n", ranks, sys.executable, *(["-m", "mpipipe", "run"] if run else []), script]
        job = Job(command, tmp_path, {"MPIPIPE_WATCHDOG": str(watchdog), **(env or {})})
        try:
            meanwhile(job)
            assert job.wait(90), f"still running\n{job.stdout}\n{job.stderr}"
            assert not job.outlived_by(5)
        finally:
            job.end()
        return job

    return start


def report_of(job) -> str:
    """The one report of a job that hung."""
    assert (job.returncode, job.stderr.count(HEADING)) == (HUNG, 1), job.stderr
    assert "finished" not in job.stdout
    assert len(re.findall(r"no rank has made progress for \d+\.\d s", job.stderr)) == 1, job.stderr
    return job.stderr


def healthy(job, ranks=2):
    assert (job.returncode, job.stdout.count("finished"), job.stderr) == (0, ranks, "")


def test_a_rank_that_sleeps_in_a_forward_is_named_as_computing(play):
    body = "def breaking(_):\n    if rank == last: breaks('forward', lambda: time.sleep(1000))" + TWO_STEPS
    report = report_of(play(body, ranks=3))
    assert re.search(
        r"\n  rank 2 on \S+ has been computing for \d+ s: forward of stage 2, micro-batch 0, in step \(call 2\) of "
        r"pipeline 1 \(one_f_one_b\), at \S+job.py:\d+ in <lambda>\n  rank 0 waits for the gradient",
        report,
    ), report
    assert "rank 1 waits for the gradient of micro-batch 0 over edge 2 from rank 2 (channel 0, tag 3)" in report


@pytest.mark.long
@pytest.mark.parametrize(
    ("act", "state"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "it is stopped by a signal"),
        ("re.match('(a+)+$', 'a' * 60 + 'b')", "it runs, but a call keeps its interpreter busy"),
    ],
)
def test_a_rank_that_cannot_answer_is_silent_with_the_state_of_its_process(play, act, state):
    body = f"import re\ndef breaking(_):\n    if rank == 0: {act}" + TWO_STEPS
    report = report_of(play(body))
    assert re.search(rf"\n  rank 0 on \S+ \(process \d+\) is silent: it has not answered for \d+ s; {state}", report), (
        report
    )


@pytest.mark.long
def test_a_job_that_is_stopped_as_a_whole_goes_on(play):
    def stop_and_go_on(job):
        deadline = time.monotonic() + 30
        while "working" not in job.stdout and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in job.processes():
                job.send(number, pid)
            if number == signal.SIGSTOP:
                time.sleep(2.5)

    body = """
def breaking(_):
    print("working", flush=True)
    for _ in range(10 if rank == 0 else 0):
        time.sleep(0.1)
"""
    healthy(play(body + TWO_STEPS, watchdog=2, meanwhile=stop_and_go_on))


@pytest.mark.long
def test_actions_that_are_longer_than_the_limit_and_poll_between_layers_are_no_hang(play):
    """Each forward takes 1.5 s, each layer 0.3 s, and the limit is 1 s."""
    body = """
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.3)
        return super().forward(x)

stages = [nn.Stage([Slow(64, 64) for _ in range(5)], first=rank * 5)]
with mpipipe.Pipeline(stages, schedules.one_f_one_b(size, 1), comm, loss=loss) as pipeline:
    pipeline.evaluate(inputs, targets)
print("finished", flush=True)
"""
    healthy(play(body, watchdog=1))


@pytest.mark.long
def test_a_rank_that_computes_in_a_ring_alone_is_told_from_those_that_wait_for_it(play):
    """A ring without a pipeline, and without the runner."""
    body = """
from mpipipe.attention.kernels import host
ring()
head = host._forward_heads
def slow(*arguments):
    if rank == 1:
        time.sleep(1000)
    return head(*arguments)
host._forward_heads = slow
ring()
print("finished", flush=True)
"""
    report = report_of(play(body, ranks=3, run=False))
    assert re.search(
        r"\n  rank 1 on \S+ has been computing for \d+ s: exchange \d+ of a ring, at \S+job.py:\d+ in slow\n", report
    ), report
    assert re.search(r"\n  rank 2 waits for message \d+ of the ring from rank 1 ", report), report
    assert report.count("computing") == 1, report


@pytest.mark.long
def test_ranks_with_a_communicator_of_their_own_watch_over_each_other(play):
    """Rank 0 is in no group, and so nobody waits for it."""
    body = """
part = comm.Split(min(rank, 1), rank)
if rank > 0:
    stages, schedule = [nn.Stage([nn.Linear(64, 64)], first=rank)], schedules.one_f_one_b(2, 4)
    inputs = np.ones((8, 64), np.float32) if rank == 1 else None
    if rank == 2:
        breaks("forward", lambda: time.sleep(1000))
    with mpipipe.Pipeline(stages, schedule, part, loss=loss) as pipeline:
        pipeline.step(inputs, np.ones((8, 64), np.float32) if rank == 2 else None)
else:
    comm.Barrier()
"""
    report = report_of(play(body, ranks=3, run=False))
    assert re.search(r"job ended by rank 1 of 3 on \S+:\n  no .*\n  rank 2 on \S+ has been computing", report), report
    assert "from rank 1 (channel 0, tag 3), which is rank 2 of the job, in backward of stage 0" in report


@pytest.mark.long
@pytest.mark.parametrize("color, ranks", [("rank // 2", 4), ("min(rank // 2, 1)", 3)])
def test_ranks_that_wait_in_one_of_two_communicators_that_overlap_are_no_hang(play, color, ranks):
    """Rows of a mesh, then columns: the ranks of one row make progress for longer than the limit, all others wait."""
    body = f"""
from mpipipe.job import group_of
rows = group_of(comm.Split({color}, rank))
columns = group_of(comm.Split(rank % 2, rank))
if rank < 2:
    for number in range(5):
        time.sleep(0.6)
        rows.agree(f"row {{number}}")
columns.agree("columns")
print("finished", flush=True)
"""
    job = play(body, ranks=ranks, run=False)
    assert job.returncode == 0 and job.stdout.count("finished") == ranks, job


@pytest.mark.long
def test_the_configuration_of_a_training_sets_the_limit(play):
    body = """
from mpipipe.language.models import GPT
from mpipipe.train import TrainConfig, train
open(f"text{rank}.txt", "w").write("to be or not to be" * 1000)
config = TrainConfig(data=("text0.txt",), out="run", dim=8, layers=2, heads=1, hidden=8, seq_len=8, batch=8, steps=9,
                     watchdog=1.5, device="cpu")
forward, calls = nn.Embedding.forward, []
def slow(*arguments):
    calls.append(1)
    if len(calls) > 30:
        time.sleep(1000)
    return forward(*arguments)
comm.Barrier()
nn.Embedding.forward = slow
train(config, GPT)
"""
    report = report_of(play(body, watchdog=0))
    assert re.search(r"rank 0 on \S+ has been computing for \d+ s: forward of stage 0, micro-batch", report), report


@pytest.mark.long
def test_where_mpi_takes_one_thread_only_the_waits_watch(play):
    opening = "import mpi4py\nmpi4py.rc.thread_level = 'serialized'\n" + OPENING
    body = "def breaking(_):\n    if rank == 1: breaks('forward', lambda: time.sleep(1000))" + TWO_STEPS
    report = report_of(play(body, opening=opening, run=False))
    assert re.search(r"\n  rank 1 on .* MPI was initialised without MPI_THREAD_MULTIPLE\n", report), report


def test_no_thread_is_left_and_mpi_may_be_finalized_by_hand(play):
    body = """
def breaking(_): pass
names = lambda: [thread.name for thread in threading.enumerate()]
"""
    body += TWO_STEPS.replace("print(", "assert 'mpipipe watchdog' in names()\nprint(")
    body += """
from mpi4py import MPI
MPI.Finalize()
assert 'mpipipe watchdog' not in names(), names()
"""
    healthy(play(body, watchdog=1, run=False))


@pytest.mark.long
def test_a_watchdog_that_is_switched_off_has_no_thread(play):
    body = "def breaking(_): assert threading.active_count() == 1\n" + on("0", "time.sleep(2)") + TWO_STEPS
    healthy(play(body, watchdog=0, run=False))
