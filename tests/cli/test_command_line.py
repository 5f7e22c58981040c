"""The command line itself: what it reads, refuses, suggests and completes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import invoke

from mpipipe.cli.command_line import ALL, COMMANDS, Command, parser_of
from mpipipe.cli.flags import parameters_of
from mpipipe.job import settings


def read(command: str, *words: str) -> dict:
    return parser_of(f"prog {command}", COMMANDS[command].load()).parse(list(words))


def commands_below(group: Command) -> list[Command]:
    found = []
    for command in group.commands.values():
        found += [command] if command.place else commands_below(command)
    return found


def test_only_what_was_given_is_returned_in_its_type():
    assert read("convert", "here", "there") == {"source": "here", "target": "there"}
    words = ["--schedule", "gpipe", "--out=x", "--ranks", "4", "--memory-limit", "1e-3", "--recompute"]
    expected = {"schedule": "gpipe", "out": Path("x"), "ranks": 4, "memory_limit": 0.001, "recompute": True}
    assert read("simulate", *words) == expected
    assert read("train", "--no-tied", "--data", "a", "--data", "b") == {"tied": False, "data": ["a", "b"]}
    # all words after a script are its own
    words = ["--log-level", "x", "--", "b"]
    assert read("run", "a", *words) == {"target": "a", "arguments": words}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("simulate", "the following arguments are required: --schedule"),
        ("run", "are required: TARGET\n"),
        ("generate here --count ten", "'ten' is not an integer"),
        ("generate here --count 0", "0 is out of range: expected at least 1"),
        (f"generate here --seed {2**63}", f"{2**63} is out of range: expected 0 to"),
        ("train --flops nan", "nan is out of range: expected above 0"),
        ("train --dtype int8", "choose from"),
        ("generate here --coutn 3", "there is no option --coutn\n  did you mean: --count"),
        ("generate here --coun=3", "there is no option --coun\n  did you mean: --count"),
    ],
)
def test_wrong_usage_is_one_message_with_exit_code_2(words, message):
    ended = invoke(*words.split())
    assert message in ended.report and ended.code == 2
    assert ended.report.count("--help` explains") == 1


def test_the_help_has_paragraphs_groups_ranges_and_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    text = parser_of("prog train", COMMANDS["train"].load()).format_help()
    assert text.startswith("usage: prog train [options] [FILE.py[:CLASS]]\n\nTrain a GPT on text or tokens, or")
    assert "\n\nAn example: mpiexec" in text and "steps of linear warm-up; at least 0; default: 30" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("command", commands_below(ALL), ids=lambda command: command.place)
def test_every_command_is_there_and_has_a_help(command):
    function = command.load()
    assert function.__doc__ and command.summary and parameters_of(function) is not None
    text = parser_of("x", function).format_help()
    assert "--help" in text and "--log-level" in text


def test_the_flags_of_a_training_are_listed_under_headings():
    from mpipipe.cli.train import train

    lines = parser_of("x", train).format_help().splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    of_any = ["parallel:", "training:", "output:", "cluster:", "task:"]
    assert headings == ["options:", "arguments:", *of_any, "data:", "model:", "general:"]
    for flag, heading in (("--dim", "model:"), ("--chunks", "parallel:"), ("--lr", "training:"), ("--out", "output:")):
        place = next(number for number, line in enumerate(lines) if line.startswith(f"  {flag} "))
        assert next(line for line in reversed(lines[:place]) if line in headings) == heading


@pytest.mark.parametrize("words", ["--help", "simulate --schedule gpipe"])
def test_a_reader_that_leaves_is_no_error(words):
    reader, writer = os.pipe()
    os.close(reader)
    alone = {name: value for name, value in os.environ.items() if name not in settings.SIZE_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", "mpipipe", *words.split()], stdout=writer, stderr=subprocess.PIPE, text=True, env=alone
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (128 + signal.SIGPIPE, 0)  # 0: argparse passes over it where Python does not buffer


RANKS = """
import sys
from mpipipe.job import runtime
if runtime.world().rank == 1:
    sys.argv[1:] = {other}
from mpipipe.cli import main
main()
"""


def test_one_rank_reads_for_all_but_one_with_other_arguments_reads_its_own(launch, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(f"print('script {name}', flush=True)")
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(other="sys.argv[1:]"))
    job = launch(2, [script, "train", "--help"])
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("usage: ") == 1
    script.write_text(RANKS.format(other=["run", str(tmp_path / "b.py")]))
    job = launch(2, [script, "run", str(tmp_path / "a.py")])
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["script a", "script b"]
    (tmp_path / "a.py").write_text("import mpipipe\nmpipipe.Mesh(mpipipe.world(), pipe=2)")  # which needs both ranks
    for words, said in ((["train", "--bogus"], "there is no option --bogus"), (["train", "--help"], "rank 1")):
        script.write_text(RANKS.format(other=words))
        job = launch(2, [script, "run", str(tmp_path / "a.py")])
        assert job.returncode != 0 and said in job.stderr, job
