"""The command line itself: what it reads, refuses, suggests and completes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest

from mpipipe.cli.command_line import ALL, Command, parser_of
from mpipipe.cli.flags import Operand, parameters_of
from mpipipe.job import settings
from mpipipe.job.exit import Stop
from mpipipe.options import Option


def sample(
    source: Annotated[str, Operand("from where")],
    out: Annotated[Path, Option("to where", metavar="FILE")],
    others: Annotated[list[str] | None, Operand("more of it")] = None,
    count: Annotated[int, Option("how many", names=("--count", "--number"), least=1, most=9)] = 3,
    share: Annotated[float | None, Option("of 100 %", least=0)] = None,
    kinds: Annotated[list[str] | None, Option("which", choices=("a", "b"))] = None,
    fast: bool = True,
    short: Annotated[bool, Option("less", names=("-s",))] = False,
) -> int:
    """Do something.

    A second paragraph of the text.
    """
    return 0


def relay(
    target: Annotated[str, Operand("what")], words: Annotated[list[str] | None, Operand("for it", rest=True)] = None
) -> int:
    """Hand words on."""
    return 0


def read(*words: str) -> dict:
    return parser_of("prog sample", sample).parse(list(words))


def commands_below(group: Command) -> list[Command]:
    return [
        below
        for command in group.commands.values()
        for below in ([command] if command.place else commands_below(command))
    ]


def test_only_what_was_given_is_returned_in_its_type():
    assert read("here", "--out", "x") == {"source": "here", "out": Path("x")}
    assert read("here", "and", "there", "--out=x", "--number", "4", "--share", "1e-3", "--no-fast", "-s") == {
        "source": "here",
        "others": ["and", "there"],
        "out": Path("x"),
        "count": 4,
        "share": 0.001,
        "fast": False,
        "short": True,
    }
    assert read("here", "--out", "x", "--kinds", "a", "--kinds", "b")["kinds"] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: SOURCE, --out"),
        (["here", "--out", "x", "--count", "ten"], "'ten' is not an integer"),
        (["here", "--out", "x", "--count", "0"], "0 is out of range: expected 1 to 9"),
        (["here", "--out", "x", "--count", "10"], "10 is out of range"),
        (["here", "--out", "x", "--share", "nan"], "nan is out of range: expected at least 0"),
        (["here", "--out", "x", "--kinds", "c"], "choose from"),
        (["here", "--out", "x", "--coutn", "3"], "there is no option --coutn\n  did you mean: --count"),
        (["here", "--out", "x", "--coun=3"], "there is no option --coun\n  did you mean: --count"),
    ],
)
def test_wrong_usage_is_one_message_with_exit_code_2(words, message):
    with pytest.raises(Stop) as caught:
        read(*words)
    assert message in caught.value.text and caught.value.code == 2
    assert caught.value.text.startswith("prog sample: ") and "`prog sample --help`" in caught.value.text


def test_all_words_behind_a_script_are_its_own():
    parser = parser_of("prog relay", relay)
    assert parser.parse(["a", "--log-level", "x", "--", "b"]) == {
        "target": "a",
        "words": ["--log-level", "x", "--", "b"],
    }
    with pytest.raises(Stop, match="are required: TARGET\n"):
        parser.parse([])


def test_the_help_has_paragraphs_groups_ranges_and_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    text = parser_of("prog sample", sample).format_help()
    assert text.startswith("usage: prog sample [options] SOURCE [OTHERS ...]\n\nDo something.\n\nA second paragraph")
    assert "how many; 1 to 9; default: 3" in text and "of 100 %; at least 0" in text and "{a,b}" in text
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
