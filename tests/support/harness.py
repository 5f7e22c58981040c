"""Collective pytest: one report and one verdict for all ranks of `mpiexec -n 4 python -m pytest`, and no hang.

    collective tests (use comm, subcomm, ... or are marked mpi)  |  all others, each on one rank
    rank 0   setup  call =  teardown =  setup  call = ...        |  a test      one that starts a job  ... =
    rank 1   setup  call =  teardown =  setup  call = ...        |  one that starts a job       a test ... =
    rank 2   setup  call =  teardown =  setup  call = ...        |  a test   a test      a test        ... =

Every `=` is an exchange of the ranks' reports on a private communicator: what failed on one rank fails on all, with the
text of the lowest failing rank. The one after the teardown has the messages, too, that were never received. There is
one after the setup where that may end in different ways: for a test with fixtures of its own (`ALIKE`). Three rules
keep it free of hangs:

- a rank that runs a test has a deadline, a rank that waits for its peers has none: each polices its own work;
- a rank that failed waits only `GRACE` seconds for its peers, who may be stuck in a message that will never come;
- whoever gives up prints its own text and the stacks of its peers, and aborts the job.

Collective tests run first. Of the others a rank takes the next ones that nobody has begun. Hypothesis draws examples on
one rank alone: a collective test has none.
"""

import gc
import os
import pickle
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpipipe.job import context
from support import ledger
from support.watchdog import GRACE, Watchdog

COMMUNICATORS = {"comm", "subcomm"}
SHARED = COMMUNICATORS | {"mpi_tmp_path", "mpi_tmpdir", "mpi_file_name"}
# fixtures that are there on every rank
ALIKE = {*SHARED, "collective", "request", "monkeypatch", "capfd", "capsys", "caplog", "tmp_path", "room"}
JOBS = {"launch", "allow_seconds"}
DIRTY = pytest.StashKey[bool]()  # a test failed: messages may be left in its communicators
ROW = 512  # bytes of an exchange of one step: a label, and that all is well
BUNDLE = 3.0  # seconds of tests of a file that a rank takes at once: they share imports, caches and fixtures
POLLS = 8  # between two pauses: with MPICH an exchange of four ranks completes at the tenth poll
ADDRESS = re.compile(r"0x[0-9a-fA-F]+")  # differs from rank to rank where nothing else does


def is_collective(item) -> bool:
    """Whether all ranks run this test together; any other test runs on one rank only."""
    return bool(SHARED & set(getattr(item, "fixturenames", ()))) or item.get_closest_marker("mpi") is not None


def starts_jobs(item) -> bool:
    """Whether this test starts processes of its own that keep more than one core busy."""
    return bool(JOBS & set(getattr(item, "fixturenames", ())))


def bundles(items) -> tuple[list, list]:
    """Tests that one rank runs in a row, the longest bundles first: those that start jobs, and the others.

    A bundle is one test that starts jobs, the tests of a folder that share what they read, or neighbours in a file.
    """
    known, jobs, others, latest = ledger.seconds(), [], [], {}
    for item in items:
        seconds, together = _estimate(item, known), item.get_closest_marker("together") is not None
        key = item.path.parent if together else item.path
        if starts_jobs(item):
            jobs.append([seconds, [item]])
            continue
        if key not in latest or (not together and latest[key][0] + seconds > BUNDLE):
            latest[key] = [0.0, []]
            others.append(latest[key])
        latest[key][0] += seconds
        latest[key][1].append(item)
    longest_first = [sorted(part, key=lambda bundle: -bundle[0]) for part in (jobs, others)]
    return [bundle for _, bundle in longest_first[0]], [bundle for _, bundle in longest_first[1]]


# more turns of what a shorter test shows, for those who have the time
AT_LENGTH = os.environ.get("MPIPIPE_TEST_LONG") == "1"


def _estimate(item, known) -> float:
    """Seconds that a test may take: what it took before, or else a guess."""
    if item.nodeid in known:
        return known[item.nodeid]
    return 2.0 if starts_jobs(item) else 0.1


def on_rank_0(comm, act, *arguments):
    """Let rank 0 alone do something, after all ranks have come to it and before any goes on."""
    comm.Barrier()
    if comm.rank == 0:
        act(*arguments)
    comm.Barrier()


def listed(ranks) -> str:
    return f"rank(s) {', '.join(map(str, ranks))}"


class Collective:
    """The pytest plugin; `comms` are the communicators of the test that runs now, the first one a fresh duplicate."""

    def __init__(self, config):
        self.config = config
        self.control = MPI.COMM_WORLD.Dup()  # verdicts travel here, never on a communicator under test
        self.rank, self.size = self.control.rank, self.control.size
        self.watchdog = Watchdog(self.control)
        self.comms = []
        self.collect_errors = []
        self.own_reports = None  # reports of pure tests that the other ranks have not seen yet

    # -- exchange

    def exchange(self, label, payload, patience=None):
        """[(label, payload) of every rank], polling politely; None when a peer does not come within `patience` s."""
        mine = np.frombuffer(pickle.dumps((label, payload)), np.uint8)
        row, table = np.zeros(ROW, np.uint8), np.empty((self.size, ROW), np.uint8)
        row[:8].view(np.int64)[0] = mine.size
        row[8 : 8 + mine.size] = mine[: ROW - 8]
        if not self._wait(self.control.Iallgather(row, table), patience):
            return None
        sizes = table[:, :8].copy().view(np.int64)[:, 0]
        if sizes.max() <= ROW - 8:
            return [pickle.loads(line[8:].tobytes()) for line in table]
        everyone = np.empty(sizes.sum(), np.uint8)
        self._wait(self.control.Iallgatherv(mine, [everyone, sizes]))
        return [pickle.loads(part.tobytes()) for part in np.split(everyone, np.cumsum(sizes)[:-1])]

    def _wait(self, request, patience=None):
        start, pause = time.monotonic(), 1e-5
        while not any(request.Test() for _ in range(POLLS)):
            if patience is not None and time.monotonic() - start > patience:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        return True

    def verdicts(self, label, payload, patience, text):
        """The payloads of every rank; where one does not come within `patience`, the job ends with this text."""
        while True:
            said = self.exchange(label, payload, patience)
            if said is None:
                self.watchdog.give_up(f"{label}: peers did not end this test within {patience:g} s\n{text}")
            if all(other == label for other, _ in said):
                return [payload for _, payload in said]

    # -- session

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self):
        self.watchdog.arm("the collection")
        result = yield
        self.watchdog.disarm()
        return result

    def pytest_collectreport(self, report):
        if report.failed:
            self.collect_errors.append(f"{report.nodeid}: {report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if self.config.getoption("collectonly"):
            return None
        self._agree_on_collection(session)
        if session.testsfailed:
            return None  # pytest's own loop reports errors of the collection
        gc.freeze()  # no search for garbage, of which tests make many, walks through what has been collected
        self._run(session, [item for item in session.items if is_collective(item)])
        self._stop_if_asked(session)
        self.own_reports = {}
        pure = [item for item in session.items if not is_collective(item)]
        with tempfile.TemporaryDirectory(prefix="mpipipe-claims-") as folder:  # of rank 0 in the end
            claims = Path(self.exchange("claims", folder)[0][1])
            self._run(session, self._own(pure, claims) if self.size > 1 else pure)
            self._share_reports()
        self._stop_if_asked(session)
        return True

    def _own(self, items, claims):
        """The tests of this rank, one after another: whoever is free takes the next bundle, by making its folder.

        Tests that start jobs go to one rank more than there are cores, so that no more jobs run at once: half of their
        time is that of jobs which wait for a limit.
        """
        jobs, others = bundles(items)
        first = 0 if self.rank <= (os.cpu_count() or 1) else len(jobs)
        for number, bundle in list(enumerate(jobs + others))[first:]:
            try:
                (claims / str(number)).mkdir()
            except FileExistsError:  # another rank has it
                continue
            yield from bundle

    def _agree_on_collection(self, session):
        mine = ([item.nodeid for item in session.items], self.collect_errors)
        if self.rank:  # only rank 0 writes the caches of --last-failed and --stepwise
            for name in ("lfplugin", "nfplugin", "stepwiseplugin"):
                self.config.pluginmanager.unregister(name=name)
        said = self.verdicts("collection", mine, None, "")
        outlines = [(tests, len(errors)) for tests, errors in said]
        different = [rank for rank, outline in enumerate(outlines) if outline != outlines[0]]
        if different:
            texts = [f"{listed([rank])}:\n{error}" for rank, (_, errors) in enumerate(said) for error in errors]
            session.shouldfail = "\n".join([f"{listed(different)} collected other tests than rank 0", *texts])
            raise session.Failed(session.shouldfail)

    def _run(self, session, items):
        items = iter(items)
        item = next(items, None)
        while item is not None and not (session.shouldfail or session.shouldstop):
            following = next(items, None)
            self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following

    def _share_reports(self):
        """Log on every rank what the other ranks found in their pure tests."""
        hook, own, self.own_reports = self.config.hook, self.own_reports, None
        said = self.verdicts("pure tests", own, None, "")
        for rank, reports in enumerate(said):
            if rank == self.rank:
                continue
            for nodeid, (location, phases) in reports.items():
                hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
                for data in phases:
                    report = hook.pytest_report_from_serializable(config=self.config, data=data)
                    hook.pytest_runtest_logreport(report=report)
                hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    def _stop_if_asked(self, session):
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def pytest_runtest_logreport(self, report):
        if self.own_reports is not None:
            _, phases = self.own_reports.setdefault(report.nodeid, (report.location, []))
            phases.append(self._packed(report))

    def pytest_internalerror(self, excrepr):
        if self.size > 1:
            self.watchdog.give_up(f"pytest itself failed:\n{excrepr}")

    def pytest_keyboard_interrupt(self, excinfo):
        if self.size > 1 and not isinstance(excinfo.value, pytest.Session.Interrupted):
            self.watchdog.give_up(f"stopped: {excinfo.exconly()}")

    # -- one test

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.watchdog.arm(item.nodeid)
        if COMMUNICATORS & set(getattr(item, "fixturenames", ())):
            fresh, request = MPI.COMM_WORLD.Idup()  # Dup would keep a core busy on each rank that waits
            self._wait(request)
            self.comms = [fresh]
        result = yield
        self.watchdog.disarm()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        early = call.when == "setup" and not self._may_differ(item)
        if is_collective(item) and not (early and report.passed):
            self.watchdog.disarm()
            leaks = self._leaks() if call.when == "teardown" else []
            # a rank whose setup has failed against all expectation meets the others at the end of their call
            report, leaks = self._merged(report, leaks, "call" if early else call.when)
            item.stash[DIRTY] = item.stash.get(DIRTY, False) or report.failed or hasattr(report, "wasxfail")
            if call.when == "teardown":
                self._end(report, leaks, item.stash[DIRTY])
        if call.when != "teardown":
            self.watchdog.arm(item.nodeid)
        return report

    def _may_differ(self, item):
        """Whether a setup may fail or skip on some ranks only: else all of them come to the call, or none."""
        parameters = item.callspec.params if hasattr(item, "callspec") else ()
        return not ALIKE.issuperset(set(item.fixturenames).difference(parameters))

    def _merged(self, report, leaks, when):
        """(one report, leaks) out of those of all ranks; a peer's failure or skip must not go unseen."""
        label = (report.nodeid, when)
        unusual = not report.passed
        text = report.longreprtext if report.failed else f"{report.outcome} on this rank: {report.longrepr}"
        mine = self._packed(report) if unusual else None, leaks
        said = self.verdicts(label, mine, GRACE if unusual else None, text)
        leaks = [f"rank {rank}: unreceived message {text}" for rank, (_, texts) in enumerate(said) for text in texts]
        return self._one_of(report, {rank: self._unpacked(data) for rank, (data, _) in enumerate(said) if data}), leaks

    def _one_of(self, report, others):
        failed = {rank: other for rank, other in others.items() if other.failed}
        skipped = [rank for rank, other in others.items() if other.skipped]
        expected = [rank for rank in skipped if hasattr(others[rank], "wasxfail")]
        if failed:
            return self._failed_somewhere(failed)
        if expected:
            return others[expected[0]]
        if 0 < len(skipped) < self.size:
            reason = others[skipped[0]].longrepr[-1]
            ranks = [rank for rank in range(self.size) if rank not in skipped]
            report.outcome = "failed"
            report.longrepr = f"{listed(skipped)} skipped ({reason}), {listed(ranks)} did not: skip on all or on none"
        return report

    def _failed_somewhere(self, failed):
        first, *rest = failed
        report = failed[first]
        if self.size > 1:
            report.sections.insert(0, ("ranks", f"failed on {listed(failed)} of {self.size}; above: rank {first}"))
        seen = {self._gist(report)}
        for rank in rest:
            if self._gist(failed[rank]) not in seen:
                seen.add(self._gist(failed[rank]))
                report.sections.append((f"rank {rank}", failed[rank].longreprtext))
        return report

    def _gist(self, report):
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is None:
            return report.longreprtext
        return crash.path, crash.lineno, re.sub(ADDRESS, "", crash.message).partition("\n")[0]

    def _leaks(self):
        """Messages that were sent to this rank and never received; the exchange after the call was the barrier."""
        status, texts = MPI.Status(), []
        for comm in self.comms:
            if comm != MPI.COMM_NULL and any(comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status) for _ in range(3)):
                texts.append(f"from rank {status.source} with tag {status.tag} on {comm.name or 'a communicator'}")
        return texts

    def _end(self, report, leaks, dirty):
        """Fail when a message was never received, and free the communicators of a test that has left them in order."""
        comms, self.comms = [comm for comm in self.comms if comm != MPI.COMM_NULL], []
        try:
            if (
                leaks and not dirty
            ):  # not freed: MPICH gives the same context to the next communicator, with the message
                report.outcome, report.longrepr = "failed", "\n".join(leaks)
            elif not dirty:
                for comm in comms:
                    comm.Free()
        finally:  # a message that nobody has read yet must not end a wait of the next test, but it may end this freeing
            context.current_rank().groups.clear()

    def _packed(self, report):
        return self.config.hook.pytest_report_to_serializable(config=self.config, report=report)

    def _unpacked(self, data):
        return self.config.hook.pytest_report_from_serializable(config=self.config, data=data)


def install(config):
    """Make this pytest session collective; only rank 0 writes to the terminal."""
    plugin = Collective(config)
    config.pluginmanager.register(plugin, "collective")
    if plugin.rank:
        config.pluginmanager.unregister(name="terminalreporter")
