"""Code of a user that ends the program, raises at the end, or gives what cannot be meant: one report with its line."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mpipipe.cli.output import naming_exits
from mpipipe.errors import ConfigError, MpipipeError
from mpipipe.job import inprocess
from mpipipe.planning import memory
from mpipipe.planning.memory import tracing
from mpipipe.train import TaskFileConfig, load_task, run
from mpipipe.train.setup import export

FILE = """
import sys
import numpy as np
from mpipipe import nn, train
# top

class Own(nn.Gelu):
    def forward(self, x):
        # forward
        return super().forward(x)

    def backward_input(self, dy, saved):
        # backward
        return super().backward_input(dy, saved)


class Waves(train.Task):
    # attributes

    def __init__(self):
        pass  # init

    def layers(self, shard):
        # layers
        return [nn.Linear(3, 4), Own(), nn.Linear(4, 3)]

    def loss(self, output, target):
        # loss
        return nn.mean_squared_error(output, target)

    def batch(self, step, rows, shard):
        # batch
        fields = np.random.default_rng(step).normal(size=(8, 3))[rows.start : rows.stop]
        return fields, fields[:, ::-1].copy()

    def validation(self, index, rows, shard):
        # validation
        fields = np.random.default_rng(1000 + index).normal(size=(8, 3))[rows.start : rows.stop]
        return fields, fields[:, ::-1].copy()

    def metrics(self, output, target):
        metrics = {}
        # metrics
        return metrics

    def show(self, output, target, shard):
        # show
        return "shown"

    def costs(self):
        # costs
        return [1.0, 1.0, 1.0]

    def optimizer(self, stages, config):
        # optimizer
        return None

    def rate_at(self, step, config):
        # rate_at
        return 1e-3

    def state_name(self, name):
        # state_name
        return name


# end
"""
PLACES = "top forward backward init layers loss batch validation metrics show costs optimizer rate_at".split()


def train(tmp_path, place, line, ranks=1, **keys):
    """Train the task with a line of code in place of a comment."""
    file = tmp_path / "waves.py"
    file.write_text(FILE.replace(f"# {place}\n", f"{line}\n").replace("pass  # init", "pass"))
    config = TaskFileConfig(
        task=str(file), batch=4, steps=4, microbatches=2, device="cpu", out=str(tmp_path / "run"), **keys
    )
    inprocess.run(ranks, lambda comm: run(load_task(config.task, config.set, comm), config, comm))
    return [json.loads(text, parse_constant=pytest.fail) for text in (tmp_path / "run/metrics.jsonl").open()]


@pytest.mark.parametrize(("place", "ahead"), [*((place, False) for place in PLACES), ("batch", True)])
def test_code_that_leaves_with_code_0_is_an_error_with_its_line(tmp_path, place, ahead):
    line = "if step > 1: sys.exit(0)" if ahead else "sys.exit(0)"
    source = FILE.replace("# attributes", "read_ahead = True") if ahead else FILE
    source = source.replace("pass  # init", "# init").replace(f"# {place}\n", f"{line}\n")
    number = 1 + source.splitlines().index(next(text for text in source.splitlines() if line in text))
    file = tmp_path / "waves.py"
    file.write_text(source.replace("# init", "pass"))
    config = TaskFileConfig(task=str(file), batch=4, steps=4, device="cpu", out=str(tmp_path / "run"))
    with pytest.raises(MpipipeError, match=f"line {number} of {file}"), naming_exits():
        inprocess.run(1, lambda comm: run(load_task(config.task, config.set, comm), config, comm))


@pytest.mark.parametrize("option", ["--check", "--dry-run"])
def test_code_that_leaves_by_os_exit_is_an_error_where_one_process_looks_at_a_task(launch, tmp_path, option):
    file = tmp_path / "waves.py"
    file.write_text(FILE.replace("# forward\n", "import os; os._exit(0)\n"))
    job = launch(0, ["-m", "mpipipe", "train", str(file), option])
    assert job.returncode == 2 and "code of yours ends the program by os._exit(0)" in job.stderr, job
    assert f"line {1 + FILE[: FILE.index('# forward')].count(chr(10))} of {file}" in job.stderr


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("layout = 'spiral'", r"Waves.layout in waves.py cannot be used(.|\n)*spiral(.|\n)*contiguous or zigzag"),
        ("per_second = 'loss'", "Waves.per_second in waves.py cannot be used"),
        ("units = 0", "Waves.units in waves.py cannot be used"),
        ("freeze = (3,)", "Waves.freeze in waves.py cannot be used"),
        ("freeze = '0.*'", "Waves.freeze in waves.py cannot be used"),
        ("groups = 5", "Waves.groups in waves.py cannot be used"),
        ("folders = 'weights'", "Waves.folders in waves.py cannot be used"),
    ],
)
def test_an_attribute_that_cannot_be_meant_is_named(tmp_path, line, text):
    with pytest.raises(ConfigError, match=text):
        train(tmp_path, "attributes", line)


@pytest.mark.parametrize("loss", ["3", "None", "dict"])
def test_a_loss_that_is_no_function_is_named(tmp_path, loss):
    with pytest.raises(ConfigError, match=r"Waves\.loss in waves.py cannot be used"):
        train(tmp_path, "end", f"Waves.loss = {loss}")


@pytest.mark.parametrize(
    ("place", "line", "text"),
    [
        ("costs", "return [1.0] * 50", r"Waves.costs in waves.py returns no cost(.|\n)*3 finite numbers"),
        ("costs", "return [1.0, 2.0, float('nan')]", "Waves.costs in waves.py returns no cost"),
        ("costs", "return 7", "Waves.costs in waves.py raised TypeError"),
        ("optimizer", "return {}", r"Waves.optimizer in waves.py returns no optimizer(.|\n)*dict without stages"),
        ("optimizer", "return stages[7]", r"Waves.optimizer in waves.py raised IndexError(.|\n)*line"),
        ("metrics", "metrics[1, 2] = 5.0", "the name of a metric cannot be written"),
        ("metrics", r"metrics['a\nmpipipe: ok steps=9'] = 5.0", "the name of a metric cannot be written"),
        ("metrics", "metrics['a loss=0'] = 5.0", "the name of a metric cannot be written"),
    ],
)
def test_what_a_method_returns_in_error_is_named(tmp_path, place, line, text):
    with pytest.raises(MpipipeError, match=text):
        train(tmp_path, place, line)


def test_a_training_that_cannot_show_its_model_has_ended_well(tmp_path, capsys):
    train(tmp_path, "show", "raise OSError('no display')", 2)
    lines = capsys.readouterr().out.splitlines()
    assert "mpipipe: warning: Waves.show in waves.py raised OSError: no display" in lines
    assert lines[-1].startswith("mpipipe: ok steps=4") and (tmp_path / "run" / "finished").exists()


def test_a_metric_that_is_not_finite_is_null_in_json_over_a_resume(tmp_path):
    line = "metrics.update(a=float('nan'), b=float('inf'), c=1.5)"
    first = train(tmp_path, "metrics", line, save_every=2)
    again = train(tmp_path, "metrics", line, save_every=2, resume="auto")
    assert again == first
    assert (again[-1]["a"], again[-1]["b"], again[-1]["c"]) == (None, None, 1.5)
    for path in (tmp_path / "run").rglob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("name", ["'__metadata__'", "'\\udc80'", "''", "3", "'same'"])
def test_a_name_that_no_reader_of_weights_takes_is_refused(tmp_path, name):
    train(tmp_path, "state_name", f"return {name}")
    with pytest.raises(ConfigError, match="state_name gives no name of its own"):
        export(tmp_path / "run", tmp_path / "weights.safetensors")
    assert not (tmp_path / "weights.safetensors").exists()


def test_a_name_that_raises_is_one_report_with_its_line(tmp_path):
    train(tmp_path, "state_name", "raise KeyError(name)")
    with pytest.raises(ConfigError, match=r"Waves.state_name in waves.py raised KeyError(.|\n)*line "):
        export(tmp_path / "run", tmp_path / "weights.safetensors")


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


def test_the_trace_of_memory_is_not_stopped_beside_threads_of_a_user(monkeypatch):
    """Python may end the process by SIGSEGV where another thread allocates meanwhile."""
    calls = []
    trace = SimpleNamespace(
        is_tracing=lambda: False, start=lambda: calls.append("start"), stop=lambda: calls.append("stop")
    )
    monkeypatch.setattr(memory, "tracemalloc", trace)
    monkeypatch.setattr(memory, "UNTRACED", set())
    stop = threading.Event()
    users = threading.Thread(target=stop.wait)
    # those that libraries of other tests have left go on
    threads = [threading.main_thread(), threading.Thread(name="mpipipe watchdog of a test")]
    monkeypatch.setattr(threading, "enumerate", lambda: threads)
    with tracing():
        threads.append(users)
        users.start()
    assert calls == ["start"]
    threads.remove(users)
    stop.set()
    users.join()
    with tracing():
        pass
    assert calls == ["start", "start", "stop"]


READER = """
import os, random, time
import numpy as np
from mpipipe import nn, train

ROWS, PLACE = 512, "{place}"


class Reads(train.Task):
    loss = staticmethod(nn.mean_squared_error)
    read_ahead = {ahead}

    def layers(self, shard):
        return [nn.Linear(4, 8), nn.Gelu(), nn.Dropout(0.3), nn.Linear(8, 4)]

    def sleep(self):
        if self.slow and random.Random(time.perf_counter_ns()).random() < 0.2:
            time.sleep(1e-3)

    def rows(self, numbers):
        if self.handle is None:
            self.handle = open(PLACE, "rb")
        for place, number in enumerate(numbers):
            self.handle.seek(32 * (number % ROWS))
            self.sleep()
            self.scratch[place] = np.frombuffer(self.handle.read(32))
        return self.scratch[: len(numbers)]

    scratch, handle = np.empty((8, 4)), None
    slow = {slow}

    def batch(self, step, rows, shard):
        random.seed(step)
        np.random.seed(step)
        self.sleep()
        order = [random.randrange(ROWS) for _ in range(8)]
        noise = np.random.normal(size=(8, 4))[rows.start : rows.stop]
        found = self.rows(order[rows.start : rows.stop])
        self.sleep()
        return found, found[:, ::-1] + noise

    def validation(self, index, rows, shard):
        return self.batch(10_000 + index, rows, shard)

    def rate_at(self, step, config):
        np.random.seed(99)
        random.seed(99)
        return 1e-3
"""


@pytest.mark.long
def test_200_steps_of_a_reader_with_one_handle_and_global_generators_have_the_bits_of_one_alone(tmp_path):
    """It fills one array again, sleeps at random places, and another method seeds the generators that it draws from."""
    place = tmp_path / "rows.bin"
    np.random.default_rng(0).normal(size=(512, 4)).tofile(place)

    def losses(ahead, slow):
        name = f"reads_{ahead}_{slow}"
        file = tmp_path / f"{name}.py"
        file.write_text(READER.format(place=place, ahead=ahead, slow=slow))
        config = TaskFileConfig(
            task=str(file), batch=8, steps=200, microbatches=2, eval_every=9, log_every=1, warmup=0, device="cpu",
            dtype="float64", out=str(tmp_path / name),
        )  # fmt: skip
        inprocess.run(1, lambda comm: run(load_task(config.task, (), comm), config, comm))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [[json.loads(line).get(key) for key in ("loss", "validation", "grad_norm")] for line in lines]

    expected = losses(False, False)
    assert losses(False, True) == expected and len(expected) == 201
    assert losses(True, True) == expected
