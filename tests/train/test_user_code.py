"""Code of a user that ends the program, raises at the end, or gives what cannot be meant: one report with its line."""

import json

import pytest
from support.small_training import metrics

from mpipipe.cli.output import naming_exits
from mpipipe.errors import ConfigError, MpipipeError
from mpipipe.job import inprocess
from mpipipe.train import TaskFileConfig, load_task, run
from mpipipe.train.setup import export

FILE = """
import sys
import numpy as np
from mpipipe import nn, train
# top

def fields(seed, rows):
    made = np.random.default_rng(seed).normal(size=(8, 3))[rows.start : rows.stop]
    return made, made[:, ::-1].copy()

class Own(nn.Gelu):
    def forward(self, x):
        # forward
        return super().forward(x)

    def backward_input(self, dy, saved):
        # backward
        return super().backward_input(dy, saved)

class Waves(train.Task):
    # attributes
"""
METHODS = {
    "__init__(self)": "self.file = None",
    "layers(self, shard)": "return [nn.Linear(3, 4), Own(), nn.Linear(4, 3)]",
    "loss(self, output, target)": "return nn.mean_squared_error(output, target)",
    "batch(self, step, rows, shard)": "return fields(step, rows)",
    "validation(self, index, rows, shard)": "return fields(1000 + index, rows)",
    "metrics(self, output, target)": "return {}",
    "show(self, output, target, shard)": "return 'shown'",
    "costs(self)": "return [1.0, 1.0, 1.0]",
    "optimizer(self, stages, config)": "return None",
    "rate_at(self, step, config)": "return 1e-3",
    "state_name(self, name)": "return name",
}
for _head, _body in METHODS.items():
    FILE += f"    def {_head}:\n        # {_head.partition('(')[0].strip('_')}\n        {_body}\n\n"
FILE += "# end\n"
PLACES = "top forward backward init layers loss batch validation metrics show costs optimizer rate_at"


def train(tmp_path, lines, ranks=1, **keys):
    """Train the task with lines of code in place of comments, by their names."""
    source, file = FILE, tmp_path / "waves.py"
    for place, line in lines.items():
        source = source.replace(f"# {place}\n", f"{line}\n")
    file.write_text(source)
    keys = dict(steps=4, microbatches=2) | keys
    config = TaskFileConfig(task=str(file), batch=4, device="cpu", out=str(tmp_path / "run"), **keys)
    inprocess.run(ranks, lambda comm: run(load_task(config.task, config.set, comm), config, comm))
    return metrics(config)


LEAVING = [{place: "sys.exit(0)"} for place in PLACES.split()]
LEAVING.append({"batch": "if step > 1: sys.exit(0)", "attributes": "read_ahead = True"})


@pytest.mark.parametrize("lines", LEAVING, ids=str)
def test_code_that_leaves_with_code_0_is_an_error_with_its_line(tmp_path, lines):
    with pytest.raises(MpipipeError) as caught, naming_exits():
        train(tmp_path, lines)
    source = (tmp_path / "waves.py").read_text()
    number = 1 + source[: source.index("sys.exit(0)")].count("\n")
    assert f"line {number} of {tmp_path / 'waves.py'}" in str(caught.value)


@pytest.mark.parametrize("option", ["--check", "--dry-run"])
def test_code_that_leaves_by_os_exit_is_an_error_where_one_process_looks_at_a_task(launch, tmp_path, option):
    file = tmp_path / "waves.py"
    file.write_text(FILE.replace("# forward\n", "import os; os._exit(0)\n"))
    job = launch(0, ["-m", "mpipipe", "train", str(file), option])
    assert job.returncode == 2 and "code of yours ends the program by os._exit(0)" in job.stderr, job
    assert f"line {1 + FILE[: FILE.index('# forward')].count(chr(10))} of {file}" in job.stderr


@pytest.mark.parametrize(
    ("place", "line", "text"),
    [
        ("attributes", "unit = None", "Waves.unit in waves.py cannot be used"),
        ("attributes", "units = 0", "Waves.units in waves.py cannot be used"),
        ("attributes", "per_second = 'loss'", "Waves.per_second in waves.py cannot be used"),
        ("attributes", "folders = 'weights'", "Waves.folders in waves.py cannot be used"),
        ("costs", "return [1.0] * 50", r"Waves.costs in waves.py returns no cost(.|\n)*3 finite numbers"),
        ("costs", "return [1.0, 2.0, float('nan')]", "Waves.costs in waves.py returns no cost"),
        ("costs", "return 7", "Waves.costs in waves.py raised TypeError"),
        ("optimizer", "return {}", r"Waves.optimizer in waves.py returns no optimizer(.|\n)*dict without stages"),
        ("optimizer", "return stages[7]", r"Waves.optimizer in waves.py raised IndexError(.|\n)*line"),
        ("metrics", "return {(1, 2): 5.0}", "the name of a metric cannot be written"),
        ("metrics", r"return {'a\nmpipipe: ok steps=9': 5.0}", "the name of a metric cannot be written"),
        ("metrics", "return {'a loss=0': 5.0}", "the name of a metric cannot be written"),
    ],
)
def test_what_cannot_be_meant_is_named(tmp_path, place, line, text):
    with pytest.raises(MpipipeError, match=text):
        train(tmp_path, {place: line})


def test_a_training_that_cannot_show_its_model_has_ended_well(tmp_path, capsys):
    train(tmp_path, {"show": "raise OSError('no display')"}, 2)
    lines = capsys.readouterr().out.splitlines()
    assert "mpipipe: warning: Waves.show in waves.py raised OSError: no display" in lines
    assert lines[-1].startswith("mpipipe: ok steps=4") and (tmp_path / "run" / "finished").exists()


def test_a_metric_that_is_not_finite_is_null_in_json_over_a_resume(tmp_path):
    lines = {"metrics": "return dict(a=float('nan'), b=float('inf'), c=1.5)"}
    first = train(tmp_path, lines, save_every=2)
    again = train(tmp_path, lines, save_every=2, resume="auto")
    assert again == first
    assert (again[-1]["a"], again[-1]["b"], again[-1]["c"]) == (None, None, 1.5)
    for path in (tmp_path / "run").rglob("*.json*"):
        for text in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
            json.loads(text, parse_constant=pytest.fail)


NAMES = {f"return {name}": "no name of its own" for name in ("'__metadata__'", "'\\udc80'", "''", "3", "'same'")}
NAMES["raise KeyError(name)"] = r"state_name in waves.py raised KeyError(.|\n)*line "


@pytest.mark.parametrize("line", NAMES)
def test_a_name_that_no_reader_of_weights_takes_is_refused(tmp_path, line):
    train(tmp_path, {"state_name": line})
    with pytest.raises(ConfigError, match=NAMES[line]):
        export(tmp_path / "run", tmp_path / "weights.safetensors")
    assert not (tmp_path / "weights.safetensors").exists()


@pytest.mark.parametrize(
    "encode", [lambda text: b"\xef\xbb\xbf" + text.encode(), lambda text: f"# coding: latin-1{text}".encode("latin-1")]
)
def test_a_file_in_an_encoding_of_its_own_is_read_as_python_reads_it(tmp_path, encode):
    file = tmp_path / "waves.py"
    file.write_bytes(encode(FILE.replace("# attributes", "name = 'caf\xe9'")))
    config = TaskFileConfig(task=str(file), batch=4, steps=1, device="cpu", out=str(tmp_path / "run"))
    tasks = []

    def work(comm):
        tasks.append(load_task(config.task, (), comm))
        return run(tasks[0], config, comm)

    inprocess.run(1, work)
    assert tasks[0].name == "caf\xe9" and (tmp_path / "run" / "waves.py").read_bytes() == file.read_bytes()
