"""Fixtures shared by all tests, and the settings that make every rank run the same thing."""

import os
import resource
import signal
from zlib import crc32

for number in (signal.SIGINT, signal.SIGQUIT):  # ignored where a script started the tests in the background
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # before numpy is imported: the ranks share the cores

os.environ.setdefault("MPIPIPE_HALVES", "numpy")  # the reference, on any processor

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from gpu_emulator.fixture import a_gpu, an_emulated_gpu  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from mpi4py import MPI  # noqa: E402
from support import harness, ledger  # noqa: E402
from support.launch import run_job  # noqa: E402

# the same examples in every run: no randomness, no database, nothing that depends on the clock
settings.register_profile(
    "mpi",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("mpi")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if MPI.COMM_WORLD.rank:
        config.option.xmlpath = None  # --junitxml: one file, written by rank 0


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    harness.install(config)
    if MPI.COMM_WORLD.rank == 0:
        config.pluginmanager.register(ledger.Ledger(), "ledger")


def pytest_collection_modifyitems(items):
    for item in items:
        for fixture, marker in (("gpu", "gpu"), ("emulated_gpu", "emulator")):
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
        if harness.is_collective(item):
            item.add_marker("ranks")
            assert not hasattr(item.obj, "hypothesis"), f"{item.nodeid}: ranks together draw no examples"
        if harness.starts_jobs(item):
            item.add_marker("jobs")


@pytest.fixture(autouse=True)
def own_random_numbers(request):
    """Let each test draw numbers of its own from the RANDOM of its module, whatever tests this rank has run before."""
    random = getattr(request.module, "RANDOM", None)
    if random is not None:
        random.bit_generator.state = np.random.default_rng(crc32(request.node.nodeid.encode())).bit_generator.state


@pytest.fixture
def collective(request):
    """The plugin that keeps the ranks together."""
    return request.config.pluginmanager.getplugin("collective")


@pytest.fixture
def comm(request, collective):
    """A duplicate of COMM_WORLD for this test alone; a message left in it fails the test.

    Where a test is marked `few` it has the first two ranks, and is None on the others, which leave the test out.
    """
    world, few = collective.comms[0], request.node.get_closest_marker("few")
    if few is None or False in few.args or world.size <= 2:
        return world
    return request.getfixturevalue("subcomm")(2)


@pytest.fixture
def subcomm(collective):
    """subcomm(n): a communicator of n ranks on the first n ranks, None on the others; skips where ranks are too few."""
    world = collective.comms[0]

    def make(size):
        if size > world.size:
            pytest.skip(f"needs {size} ranks, here are {world.size}")
        part = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
        collective.comms.append(part)
        return part if part != MPI.COMM_NULL else None

    return make


@pytest.fixture
def pair(subcomm):
    """A communicator of the first two ranks; the others leave the test out."""
    return subcomm(2)


@pytest.fixture
def three(subcomm):
    """A communicator of the first three ranks; the others leave the test out."""
    return subcomm(3)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Leave a test of two or three ranks out on those that are not in it."""
    return True if None in [pyfuncitem.funcargs.get(name, True) for name in ("comm", "pair", "three")] else None


@pytest.fixture
def alone(monkeypatch):
    """A command of one process runs, although mpiexec has started the tests."""
    monkeypatch.setattr("mpipipe.job.settings.launcher_size", lambda environment: None)


@pytest.fixture
def room():
    """room(bytes): no file of this process can grow beyond that, as on a full disk; room(None): there is no limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def hasty(monkeypatch):
    """As few measurements as there can be before a plan is made."""
    from mpipipe.planning import links, probe

    for module in (probe, links):
        monkeypatch.setattr(module, "SECONDS", 0)
        monkeypatch.setattr(module, "REPEATS", (1, 1))
    monkeypatch.setattr(probe, "ROUNDS", 1)
    monkeypatch.setattr(links, "MANY", 2)
    monkeypatch.setattr(links, "WARMUP", 0)
    monkeypatch.setattr(links, "FIRST", 1)


@pytest.fixture
def gpu():
    """The GPU of this machine, or else the emulated one, for this test: see gpu_emulator/fixture.py.

    Device arrays are made by arrays.upload and read by arrays.download. MPIPIPE_TEST_GPU=emulator takes the emulated
    one in any case, MPIPIPE_TEST_GPU=amd one of AMD's, MPIPIPE_TEST_GPU=pretend the emulated one as if it were real,
    MPIPIPE_TEST_GPU_SEED another order of its streams.
    """
    with a_gpu() as device:
        yield device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    """What brings an array to where a test computes: on the host, or on the GPU."""
    if request.param == "cpu":
        return np.asarray
    request.getfixturevalue("gpu")
    from mpipipe import arrays

    return arrays.upload


@pytest.fixture
def emulated_gpu():
    """As gpu, but the emulated one in any case."""
    with an_emulated_gpu() as device:
        yield device


@pytest.fixture
def allow_seconds(collective, request):
    """allow_seconds(n): from now on this test may take so long, whatever the limit of a test is."""
    if harness.is_collective(request.node):
        pytest.fail(
            "this test starts jobs, so it runs on one rank: it may use no communicator and no folder of all ranks"
        )
    return lambda seconds: collective.watchdog.arm(request.node.nodeid, seconds)


@pytest.fixture
def launch(allow_seconds):
    """launch(ranks, script text or arguments, timeout=60, env=None, options=()): the outcome of a job of its own.

    Such a test runs on one rank, beside the tests of other ranks: see run_job.
    """

    def start(ranks, what, timeout=60, env=None, options=()):
        allow_seconds(timeout + 30)
        return run_job(ranks, what, timeout, env, options)

    return start
