"""mpipipe launch: starts a job, passes signals on to its launcher, and believes an exit code 0 with a proof alone.

    shell ---- signals ----> mpipipe launch ---- the same ----> mpiexec -> ranks      in a process group of its own
    shell <- exit code ----- mpipipe launch <--- exit code ---- mpiexec
                                  ^--- proof of the end (ended.py) ------- rank 0

The launcher has its own process group, and the terminal where there is one: so a Ctrl-C reaches it once, and is no
second one that would end it by force. What it takes to start must not be felt, so this module imports next to nothing.
"""

from __future__ import annotations

import os
import signal

from mpipipe.job import ended

FAILED, REFUSED, NO_START, NOT_FOUND = 1, 2, 126, 127  # exit codes; the last two as of a shell
# what belongs to this process itself: faults of its own, news of its child, and what a terminal asks of it
OWN = "SEGV BUS FPE ILL SYS TRAP ABRT CHLD CLD KILL STOP PIPE TTIN TTOU WINCH URG IO POLL PROF VTALRM".split()
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def start(words: list[str]) -> int | None:
    """Run a job as the words of a command line ask; return its exit code, or None where they ask for something else."""
    cut = words.index("--") if "--" in words else len(words)
    options, command = words[:cut], words[cut + 1 :]
    if not command or (options and (len(options) != 2 or options[0] != "--marker-folder" or not options[1])):
        return None
    return run_proven(command, options[1] if options else ".")


def run_proven(command: list[str], folder: str) -> int:
    """Run a command whose ranks prove their end in `folder`; return its exit code, 1 where it is 0 without a proof."""
    path = os.path.join(os.path.abspath(folder), ended.PREFIX + os.urandom(8).hex())
    if not command:
        _say("there is no command to start", "  remedy: mpipipe launch -- mpiexec -n 4 python -m mpipipe run script.py")
        return REFUSED
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = "  remedy: name one that all nodes share with --marker-folder DIR"
        _say(f"cannot write into the folder {folder}", remedy)
        return REFUSED
    try:
        ended.begin(True, "mpipipe launch")  # where this is part of a larger job
    except Exception as error:
        _say(*str(error).split("\n"))
        return REFUSED
    os.environ[ended.VARIABLE] = path
    try:
        code = _run(command)
        lines = ended.read(path)
    finally:
        try:
            os.unlink(path)
        except OSError:
            pass
    if code == 128 + signal.SIGINT and _has_terminal():
        _interrupt()
    if code == 0 and lines[-1:] != [ended.last_line(path)]:
        _say(f"{command[0]} returned 0, but nothing proves that all ranks have ended well", *_known(lines, folder))
        return FAILED
    if code == 0:
        ended.end()
    return code


def _known(lines: list[str], folder: str) -> tuple[str, ...]:
    """Return what is known of a job without a proof of its end, and what to do."""
    if lines:
        return (
            f"  found: {lines[0].removeprefix('begun ')} had begun, and not all have come to their end",
            "  reason: a rank was ended without a word, as by exit(0) of a library in C",
            "  remedy: look at what the ranks have printed last; where a checkpoint is saved, go on from it",
        )
    return (
        f"  found: no rank 0 of mpipipe has begun, as far as the folder {folder} shows",
        "  reason: a program without `python -m mpipipe run`, or a node of rank 0 that does not see this folder,",
        "    or processes that do not see each other, as with the mpiexec of another MPI,",
        "    or a launcher that does not hand on the variable MPIPIPE_ENDED, as srun after --export=NONE",
        "  remedy: python -m mpipipe run script.py; --marker-folder DIR names another folder; srun --export=ALL",
    )


def _say(*lines: str) -> None:
    text = "".join(f"{line}\n" for line in ("mpipipe launch: " + lines[0], *lines[1:]))
    try:
        os.write(2, text.encode(errors="backslashreplace"))
    except OSError:
        pass


def _run(command: list[str]) -> int:
    """Run a command as a child, pass signals on to it, and return its exit code; 128 and the number for a signal."""
    own = {number for name in OWN if (number := getattr(signal, f"SIG{name}", None))}
    passed = {number for number in signal.valid_signals() - own if signal.getsignal(number) != signal.SIG_IGN}
    signal.signal(signal.SIGCHLD, lambda *_: None)  # an inherited SIG_IGN would swallow the exit code
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed | {signal.SIGCHLD})
    terminal = _has_terminal()
    child = os.fork()
    if child == 0:
        _become(command, terminal, before)
    try:
        while True:
            number = signal.sigwait(passed | {signal.SIGCHLD})
            if number != signal.SIGCHLD:
                os.kill(child, number)
                continue
            found, status = os.waitpid(child, os.WNOHANG | (os.WUNTRACED if terminal else 0))
            if found and os.WIFSTOPPED(status):
                _stop_too(child)
            elif found:
                return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    finally:
        if terminal:
            _give_terminal(os.getpgrp())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become(command: list[str], terminal: bool, mask: set) -> None:
    """Turn this forked child into the command."""
    try:
        os.setpgid(0, 0)
        if terminal:
            _give_terminal(os.getpgrp())
        _die_with_parent()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvp(command[0], command)
    except BaseException as error:
        reason = getattr(error, "strerror", None) or str(error)
        _say(f"cannot start {command[0]}: {reason}")
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NO_START)


def _die_with_parent() -> None:
    """Let this process get SIGTERM where its parent is killed: the job would go on without anyone who waits for it."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM)
    except (ImportError, OSError, AttributeError):  # not Linux
        pass


def _has_terminal() -> bool:
    """Whether this process group is the one that the terminal listens to."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _give_terminal(group: int) -> None:
    """Make a process group the one that reads the terminal and gets its Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        os.tcsetpgrp(0, group)
    except OSError:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _interrupt() -> None:
    """End by SIGINT, with this process group: a shell script that started the job must not go on after a Ctrl-C."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.killpg(0, signal.SIGINT)


def _stop_too(child: int) -> None:
    """Stop this process as its child is stopped, so that the shell at the terminal notices; go on together."""
    _give_terminal(os.getpgrp())
    os.kill(os.getpid(), signal.SIGSTOP)
    if _has_terminal():
        _give_terminal(child)
    os.kill(child, signal.SIGCONT)
