"""The bar is drawn where somebody looks, and drawing never waits, fails or stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.train import screen
from mpipipe.train.report import Pace, duration
from mpipipe.train.screen import Bar, find_terminal


@pytest.fixture
def terminal(monkeypatch):
    """(what is typed and shown, what programs see) of a terminal of 40 columns."""
    monkeypatch.setenv("TERM", "xterm")
    shown, own = os.openpty()
    os.set_blocking(shown, False)
    termios.tcsetwinsize(own, (24, 40)) if hasattr(termios, "tcsetwinsize") else None
    yield shown, own
    for descriptor in (shown, own):
        with suppress(OSError):
            os.close(descriptor)


def seen(shown):
    try:
        return os.read(shown, 65536).decode()
    except BlockingIOError:
        return ""


def test_the_bar_fits_its_terminal_and_is_taken_away_for_text(terminal):
    shown, own = terminal
    bar = Bar(os.dup(own), 300)
    bar.draw(150, 2.5, "1m00s, 1m00s left")
    drawn = seen(shown)
    if hasattr(termios, "tcsetwinsize"):
        assert drawn == "\r" + "step 150/300  1m00s, 1m00s left".ljust(40)
    bar.draw(151, 2.5, "1m00s, 59s left")  # a moment later
    assert seen(shown) == ""
    bar.clear()
    assert seen(shown) == "\r\x1b[K"
    bar.draw(152, 2.5, "1m01s, 59s left")  # the text may still be on its way through the launcher
    assert seen(shown) == ""
    bar.close()
    bar.close()


def test_a_terminal_that_is_gone_or_takes_nothing_more_is_left_alone(terminal):
    shown, own = terminal
    full = os.open(os.ttyname(own), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with suppress(BlockingIOError):
        while True:
            os.write(full, b"x" * 4096)
    bar = Bar(full, 10)
    bar.draw(1, 1.0, "1s")  # returns at once
    os.close(shown)
    bar.clear()
    bar.close()


def test_a_stream_that_is_a_terminal_is_found_and_others_are_not(terminal, monkeypatch, tmp_path):
    _, own = terminal
    monkeypatch.setattr(screen, "_launcher_output", lambda: None)
    with open(own, "w", closefd=False) as stream, open(tmp_path / "text", "w") as file:
        found = find_terminal(stream)
        assert os.ttyname(found) == os.ttyname(own)
        os.close(found)
        assert find_terminal(file) is None
        with monkeypatch.context() as patch:
            patch.setenv("TERM", "dumb")
            assert find_terminal(stream) is None
        modes = termios.tcgetattr(own)
        modes[3] |= termios.TOSTOP  # it would stop a job in the background that writes
        termios.tcsetattr(own, termios.TCSANOW, modes)
        assert find_terminal(stream) is None


ASK = """
import os, subprocess, sys
code = "from mpipipe.train.screen import find_terminal; import os; found = find_terminal();" \\
       "print('none' if found is None else os.ttyname(found))"
sys.stderr.write(subprocess.run([sys.argv[1], "-c", code], stdout=subprocess.PIPE, text=True).stdout)
"""


@pytest.mark.parametrize(("name", "to_terminal"), [("mpiexec", True), ("mpiexec", False), ("other", True)])
def test_the_terminal_of_a_launcher_is_found_through_its_pipe(terminal, tmp_path, comm, name, to_terminal):
    if comm.rank:
        return
    _, own = terminal
    launcher = tmp_path / name
    launcher.symlink_to(os.path.realpath(sys.executable))
    with open(tmp_path / "file", "w") as file:
        command = [launcher, "-c", ASK, sys.executable]
        job = subprocess.run(
            command, stdout=own if to_terminal else file, stderr=subprocess.PIPE, text=True, timeout=60
        )
    expected = os.ttyname(own) if name == "mpiexec" and to_terminal else "none"
    if name == "mpiexec" or screen._launcher_output() is None:  # else the launcher of these tests is found
        assert job.stderr.strip() == expected


@given(st.integers(-5, 120), st.integers(0, 10**6), st.integers(1, 10**6), st.floats(0, 1e6))
def test_a_narrow_window_takes_the_bar_and_the_rate_before_the_step_and_the_time(width, done, steps, rate):
    done, timing = min(done, steps), "1m00s, 12m00s left"
    line = screen.bar_line(done, steps, rate, timing, width)
    assert len(line) <= max(width, 0)
    assert line.startswith(f"step {done}/{steps}"[: max(width, 0)])
    assert line.endswith(timing) or width < len(f"step {done}/{steps}  {timing}")
    assert "steps/s" in line or width < len(f"step {done}/{steps}  {rate:.3g} steps/s  {timing}")


@given(st.text(st.sampled_from("ab -\t\n"), max_size=400))
def test_folding_breaks_lines_and_changes_nothing_else(text):
    found = screen.folded(text)
    assert max(map(len, found.split("\n"))) <= screen.COLUMNS
    assert found.replace("\n", "") == text.replace("\n", "")
    if max(map(len, text.split("\n"))) <= screen.COLUMNS:
        assert found == text


def test_times_are_short():
    seconds = (0, 59.9, 60, 3599, 3600, 86_399, 90_000)
    assert [*map(duration, seconds)] == ["0s", "59s", "1m00s", "59m59s", "1h00m", "23h59m", "1d01h"]


def test_the_time_left_counts_only_the_steps_of_this_start(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("mpipipe.train.report.time.monotonic", lambda: now)
    pace = Pace(100, done=60)
    assert pace.timing() == "0s"
    now += 20.0
    for _ in range(10):
        pace.done += 1
    assert (pace.rate(), pace.timing()) == (0.5, "20s, 1m00s left")
    assert pace.stamp()["seconds"] == 20.0 and pace.stamp()["seconds"] == 0.0
    for _ in range(30):
        pace.done += 1
    assert pace.timing() == "20s"
