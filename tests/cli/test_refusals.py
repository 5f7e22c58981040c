"""What a command refuses reads the same everywhere, and names what the user gave."""

import pytest
from support.command_line import invoke
from support.text_plan import text_plan

from mpipipe.cli.info import _show
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job.inprocess import run
from mpipipe.job.report import heading
from mpipipe.train import TrainConfig


def test_one_process_alone_has_neither_a_job_nor_a_rank():
    assert heading(0, 1) == "mpipipe: stopped:"
    assert heading(2, 4).startswith("mpipipe: job ended by rank 2 of 4 on ")


@pytest.mark.parametrize(
    "words",
    [
        "train --dry-run --dim 30",
        "simulate --schedule gpip",
        "draw timeline --schedule gpip --ranks 2 --microbatches 2 --out x.svg",
        "convert absent new",
    ],
)
def test_a_refusal_on_paper_has_one_form(alone, capsys, words):
    ended = invoke(*words.split())
    assert ended.code == 2 and capsys.readouterr().out == ""
    _check_form(ended.report)


def test_a_refusal_of_a_training_on_one_rank_has_the_same(launch):
    job = launch(0, ["-m", "mpipipe", "train", "--dim", "30"])
    assert (job.returncode, job.stdout) == (2, "")
    _check_form(job.stderr)


def _check_form(report: str) -> None:
    first, second, *_ = report.splitlines()
    assert first == "mpipipe: stopped:" and second.startswith("  ") and "Error: " in second
    assert "rank 0" not in report


def test_an_error_of_the_only_rank_names_no_rank():
    def refuse(comm):
        from mpipipe.job.group import group_of

        with pytest.raises(ArgumentError) as caught, group_of(comm).raise_together("a call"):
            raise ArgumentError("no")
        return str(caught.value)

    assert run(1, refuse) == ["no"]
    assert run(2, refuse) == ["all 2 ranks: no"] * 2


@pytest.mark.parametrize(
    ("dim", "heads", "remedy"), [(30, 4, "dim = 32"), (31, 4, "dim = 32"), (12, 5, "dim = 20"), (7, 1, "dim = 8")]
)
def test_heads_that_do_not_fit_are_mended_with_options_that_there_are(dim, heads, remedy):
    with pytest.raises(ArgumentError) as caught:
        text_plan(TrainConfig(dim=dim, heads=heads))
    assert caught.value.found == f"dim {dim}, heads {heads}"
    assert caught.value.remedy == f"for example {remedy}"
    for text in remedy.split(", or "):
        name, number = text.split(" = ")
        text_plan(TrainConfig(**{"dim": dim, "heads": heads, name: int(number)}))


@pytest.mark.parametrize("keys", [{"out": ""}, {"data": ("here", "")}, {"from_": ""}, {"trace": ""}])
def test_an_empty_text_in_a_configuration_is_refused(keys):
    with pytest.raises(ConfigError, match="is empty"):
        TrainConfig(**keys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # what is gone names what to use
        (["jobscript", "slurm"], "no command jobscript\n  remedy: copy a job script: jobs/train.sbatch"),
        (["train", "--survive"], "no option --survive\n  remedy: save checkpoints"),
        (["train", "--micro-batch-size", "4"], "-size\n  remedy: a micro-batch has batch / (replicas x microbatches)"),
        (["plan", "--tp=2"], "no option --tp\n  remedy: layers are not divided over ranks"),
        # an empty text is refused before anything runs
        (["train", "--out", ""], ": it is empty\n"),
        (["train", "--data", "", "--data", "here"], ": it is empty\n"),
        (["generate", ""], ": it is empty\n"),
        (["evaluate", "here", "--data", ""], ": it is empty\n"),
        (["run", ""], ": it is empty\n"),
        # what a newcomer types
        (["train", "job.toml"], "remedy: --config job.toml names"),
        (["train", "job"], "there is no place for job\n"),
        (["train", "README.md"], "remedy: train takes a Python file"),
        (["train", "--seq", "4096", "--dry-run", "--ranks", "4"], "did you mean --seq-len 4096?"),
        (["train", "--tied=yes"], "it takes no value, but 'yes' is given"),
        (["version"], "did you mean: --version"),
        (["nothing"], "--help` explains"),
        (["trian"], "did you mean: train"),
        (["bench", "atention"], "did you mean: attention"),
        (["train", "--seq_len", "1"], "did you mean: --seq-len"),
        (["train", "--seed", "-1", "--dry-run"], "expected: at least 0 and below 2^63"),
        (["train", "--lr", "0", "--dry-run"], "expected: above 0 and finite"),
        (["simulate", "--schedule", "gpipe", "--log-level", "loud"], "--log-level"),
        (["draw"], "timeline"),
    ],
    ids=str,
)
def test_what_cannot_be_typed_is_answered_in_plain_words(alone, words, said):
    ended = invoke(*words)
    assert ended.code == 2 and said in ended.report


def test_the_facts_of_this_machine_fit_a_terminal(capsys):
    _show({"attention by": f"host, as there is no GPU {'word ' * 40}", "devices": "cpu\nGPU 0", "path": "/long" * 40})
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines[:-1]) and lines[-1].endswith("/long" * 40)
    assert lines[1].startswith(" " * 14 + "word") and "devices       cpu" in lines and "              GPU 0" in lines
