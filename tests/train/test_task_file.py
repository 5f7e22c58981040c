"""A task from a file: found, copied, hashed, trained again from its copy, and refused where it has changed."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.command_line import invoke
from support.small_training import metrics

from mpipipe import arrays, nn
from mpipipe import train as train_room
from mpipipe.checkpoint import open_tensors
from mpipipe.cli.plan import write
from mpipipe.cli.train import load_config
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job import inprocess
from mpipipe.train import TaskFileConfig, load_task, run

WAVES = """
from dataclasses import dataclass
import numpy as np
from mpipipe import nn, train


@dataclass
class Waves(train.Task):
    width: int = 4
    late: bool = False
    name: str = "w"
    layout = "zigzag"

    def layers(self, shard):
        return [nn.Linear(3, self.width), nn.Gelu(), nn.Linear(self.width, 3)]

    loss = staticmethod(nn.mean_squared_error)

    def batch(self, step, rows, shard):
        fields = np.random.default_rng(step).normal(size=(8, 3))[rows.start : rows.stop]
        return fields, fields[:, ::-1].copy()

    def validation(self, index, rows, shard):
        return self.batch(1000 + index, rows, shard)
"""
RENAMED = """
    def state_name(self, name):
        return name.replace("0.", "lift.").replace("2.", "project.")
"""
KEYS = dict(batch=4, steps=4, save_every=2, device="cpu", dtype="float64")


@pytest.fixture
def waves(tmp_path):
    file = tmp_path / "waves.py"
    file.write_text(WAVES)
    return file


def load(file, *values):
    return inprocess.run(1, lambda comm: load_task(str(file), values, comm))[0]


def train(config, ranks=1):
    return inprocess.run(ranks, lambda comm: run(load_task(config.task, config.set, comm), config, comm))[0]


def validations(folder, field="validation"):
    return [record[field] for record in metrics(folder) if "validation" in record]


def test_the_run_folder_trains_the_same_bits_again(waves, tmp_path):
    out = tmp_path / "run"
    train(load_config(f"{waves}:Waves", None, **KEYS, set=["width=5"], out=str(out)), 2)
    assert (out / "waves.py").read_text() == WAVES
    facts = json.loads((out / "environment.json").read_text())["task"]
    assert facts["class"] == "Waves" and facts["file"] == str(waves) and len(facts["sha256"]) == 64
    waves.unlink()
    moved = out.rename(tmp_path / "moved")
    again = load_config(None, str(moved / "config.toml"), out=str(tmp_path / "again"))
    assert again.set == ("width=5",)
    train(again, 2)
    assert metrics(tmp_path / "again")[-1]["loss"] == metrics(moved)[-1]["loss"]


def test_modules_next_to_the_file_are_copied_compared_and_imported_from_the_copy(waves, tmp_path):
    waves.write_text(
        WAVES.replace("import numpy", "from tidal.gauge import LEVEL\nimport numpy").replace("1000 +", "LEVEL +")
    )
    (tmp_path / "tidal").mkdir()
    (tmp_path / "tidal" / "__init__.py").write_text("")
    gauge, environment = tmp_path / "tidal" / "gauge.py", tmp_path / "lib" / "site-packages"
    gauge.write_text("import level_of_sea\nLEVEL = 1000\n")
    environment.mkdir(parents=True)
    (environment / "level_of_sea.py").write_text("")
    keys = dict(KEYS, resume="auto", out=str(tmp_path / "run"))
    sys.path.append(str(environment))
    try:
        train(load_config(str(waves), None, **keys), 2)
        copies = load(tmp_path / "run" / "waves.py").file
        assert sorted(copies.modules) == ["tidal/__init__.py", "tidal/gauge.py"]
        assert sys.modules["tidal.gauge"].__file__ == str(tmp_path / "run" / "tidal" / "gauge.py")
        assert load(waves).file.checksum == copies.checksum
        gauge.write_text("LEVEL = 20000\n")
        del sys.modules["tidal.gauge"]  # a new process
        with pytest.raises(ConfigError, match=r"of another file: waves.py, or a module next to it, has changed"):
            train(load_config(str(waves), None, **{**keys, "steps": 5}))
        again = load_config(None, str(tmp_path / "run" / "config.toml"), out=str(tmp_path / "again"))
        train(again, 2)
        assert validations(tmp_path / "again") == validations(tmp_path / "run")
        assert train(load_config(str(waves), None, **{**keys, "steps": 5}, changed_task=True)).step == 5
    finally:
        sys.path.remove(str(environment))


def test_a_rate_of_ones_own_is_stepped_with_and_written_and_a_folder_with_checkpoints_says_how_to_go_on(
    waves, tmp_path
):
    constant = "\n    def rate_at(self, step, config):\n        return config.lr\n"
    out = {}
    for name, more in (("constant", constant), ("frozen", constant.replace("config.lr", "0"))):
        waves.write_text(WAVES + more)
        out[name] = tmp_path / name
        train(load_config(str(waves), None, **KEYS, lr=0.5, log_every=1, out=str(out[name])))
    records = metrics(out["constant"])[1:]
    assert [record["lr"] for record in records] == [0.5] * 4
    assert all(record["samples_per_second"] > 0 and "tokens_per_second" not in record for record in records)
    first, *_, last = validations(out["frozen"])
    assert first == last and validations(out["constant"])[-1] != first
    with pytest.raises(ConfigError, match=r"is not empty(.|\n)*with --resume auto"):
        train(load_config(str(waves), None, **KEYS, out=str(out["frozen"])))


@pytest.mark.parametrize("place", ["weights", "checkpoints"])
def test_the_model_of_a_run_folder_predicts_what_was_validated_and_is_exported_by_name(
    waves, alone, tmp_path, place, capsys
):
    """A checkpoint has the state of an optimizer, too, and a part for each rank. The task names its weights."""
    names = ("lift", "project") if place == "weights" else ("0", "2")
    waves.write_text(WAVES + RENAMED * ("lift" in names))
    keys = dict(KEYS, save_every=2 * (place == "checkpoints"), eval_batches=1, set=["width=5"])
    train(load_config(str(waves), None, **keys, out=str(tmp_path / "run")), 2)
    waves.write_text("the file is another one now")
    moved, target = (tmp_path / "run").rename(tmp_path / "moved"), tmp_path / "waves.safetensors"
    assert [path.name for path in (moved / "weights").iterdir()] == ["step-00000004"]
    if place == "checkpoints":
        shutil.rmtree(moved / "weights")
    task, stage = train_room.load(moved)
    assert (task.width, stage.dtype, len(stage.layers)) == (5, np.float64, 3)
    fields, later = task.validation(0, range(4), None)
    forecast = stage.forward(fields, nn.Position(training=False))[0]
    assert task.loss(forecast, later)[0] == pytest.approx(validations(moved)[-1], rel=1e-12)
    capsys.readouterr()
    done = invoke("convert", str(moved), str(target))
    assert done.code == 0, done.report
    said = f"wrote 4 arrays of step 4 from {moved / place / 'step-00000004'} into {target}\n"
    assert said in capsys.readouterr().out
    with open_tensors(target, "", "", "") as file:
        assert list(file.arrays) == [f"{name}.{kind}" for name in names for kind in ("bias", "weight")]
        for (name, entry), ours in zip(file.arrays.items(), ["0.bias", "0.weight", "2.bias", "2.weight"], strict=True):
            found = np.empty(entry.shape, entry.kind)
            file.read_into(name, found)
            assert found.dtype == np.float64 and found.tobytes() == stage.parameters[ours].tobytes()
    before = target.read_bytes()
    assert "there is a file or folder of this name already" in invoke("convert", str(moved), str(target)).report
    assert target.read_bytes() == before


OWN_LOSS = """
    def loss(self, output, target):
        assert arrays.is_device(target) == arrays.is_device(output)
        return nn.mean_squared_error(output, target)

    def metrics(self, output, target):
        return {"apart": float(np.abs(output - target).mean())}

    def show(self, output, target, shard):
        return f"off by {np.abs(output - target).max():.9f}"
"""


def test_on_a_gpu_a_loss_has_its_target_there_metrics_have_numpy_arrays_and_the_model_predicts_the_same(
    gpu, waves, tmp_path, capsys
):
    waves.write_text(WAVES.replace("import nn,", "import arrays, nn,") + OWN_LOSS)
    for device in ("cpu", "cuda"):
        train(load_config(str(waves), None, **dict(KEYS, device=device), out=str(tmp_path / device)))
    host, found = (validations(tmp_path / device, "apart") for device in ("cpu", "cuda"))
    assert found == pytest.approx(host, rel=1e-12) and len(found) > 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("off by")]
    assert len(shown) == 2 and shown[0] == shown[1]
    (task, here), (_, there) = (train_room.load(tmp_path / "cpu", device) for device in ("cpu", "cuda"))
    found, expected = (stage.forward(task.batch(9, range(4), None)[0])[0] for stage in (there, here))
    assert arrays.is_device(found)
    np.testing.assert_allclose(arrays.download(found), expected, rtol=1e-12, atol=1e-14)


def test_an_export_that_cannot_be_is_one_report_and_no_file(waves, alone, tmp_path):
    waves.write_text(WAVES + RENAMED.replace("name.replace", "name[2:].replace"))
    train(load_config(str(waves), None, **KEYS, out=str(tmp_path / "run")))
    target = tmp_path / "waves.safetensors"
    cases = [
        ((tmp_path / "run", target), "Waves.state_name gives no name of its own to"),
        ((tmp_path / "run", target, "--dtype", "float32"), "are for folders"),
        ((tmp_path, target), "not that of a task in a file"),
        ((tmp_path / "absent", target), "not that of a task in a file"),
    ]
    (tmp_path / "config.toml").write_text("dim = 8\n")  # a training of text
    with pytest.raises(ConfigError, match=r"not that of a task in a file(.|\n)*checkpoint.load"):
        train_room.load(tmp_path)
    for words, text in cases:
        ended = invoke("convert", *map(str, words))
        assert ended.code and text in ended.report and not target.exists()
    waves.write_text(WAVES)
    train(load_config(str(waves), None, **KEYS, out=str(tmp_path / "again")))
    absent = tmp_path / "absent" / "waves.safetensors"
    assert "cannot be written" in invoke("convert", str(tmp_path / "again"), str(absent)).report
    part = next((tmp_path / "again" / "weights").rglob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"\1")
    assert "checksum" in invoke("convert", str(tmp_path / "again"), str(target)).report and not target.exists()


@pytest.mark.parametrize("place", ["", "weights", "weights/step-00000004", "checkpoints"])
def test_a_training_begins_with_the_weights_of_another_one(waves, tmp_path, place, capsys):
    train(load_config(str(waves), None, **KEYS, out=str(tmp_path / "run")))
    keys = dict(KEYS, lr=1e-6, init=str(tmp_path / "run" / place), out=str(tmp_path / "second"))
    train(load_config(str(waves), None, **keys), 2)
    assert validations(tmp_path / "second")[0] == pytest.approx(validations(tmp_path / "run")[-1], rel=1e-12)
    assert f"begins with the weights in {tmp_path / 'run' / place}" in capsys.readouterr().out
    assert train(load_config(str(waves), None, **{**keys, "steps": 6, "resume": "auto"})).step == 6
    with pytest.raises(ArgumentError, match="no checkpoint is here"):
        train(load_config(str(waves), None, **{**keys, "init": str(tmp_path), "out": str(tmp_path / "third")}))
    assert not (tmp_path / "third" / "metrics.jsonl").exists()


def test_weights_after_the_checkpoint_that_is_resumed_are_not_taken_for_those_of_its_end(waves, tmp_path):
    keys = dict(KEYS, steps=6, keep=3, eval_batches=1, out=str(tmp_path / "run"))
    train(load_config(str(waves), None, **keys))
    begin = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    train(load_config(str(waves), None, **{**keys, "steps": 4, "save_every": 0, "resume": begin}))
    there = sorted(path.name for path in (tmp_path / "run" / "weights").iterdir())
    assert there == ["aside-step-00000006", "step-00000004"]


def test_a_plan_in_another_folder_names_the_file_from_there(waves, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plans").mkdir()
    choice = SimpleNamespace(
        schedule="gpipe", chunks=1, microbatches=2, partition=(2, 1), recompute=0, recompute_limit=None
    )
    write(Path("plans/plan.toml"), {"task": "waves.py:Waves", "pipe": 2}, choice)
    again = load_config(None, "plans/plan.toml")
    assert again.schedule == "gpipe" and load(again.task).file.path.samefile(waves)


def test_attributes_are_set_in_their_types_and_a_folder_may_have_a_colon_in_its_name(tmp_path):
    file = tmp_path / "run:3/waves.py"
    file.parent.mkdir()
    file.write_text(WAVES)
    task = load(f"{file}:Waves", "width=7", "late=true", "name=x=y")
    assert (task.width, task.late, task.name, load(file).width) == (7, True, "x=y", 4)


@pytest.mark.parametrize(
    ("content", "name", "values", "text"),
    [
        (None, "", (), "the file of the task cannot be read"),
        ("import nothing_of_that_name", "", (), "does not import: ModuleNotFoundError(.|\n)*line 1 of"),
        ("x = 1", "", (), "no task in task.py"),
        (WAVES + "\n\nclass Second(Waves): pass", "", (), "several tasks in task.py(.|\n)*name it: task.py:Waves"),
        (WAVES, ":Wind", (), "no task Wind in task.py(.|\n)*found: Waves"),
        (WAVES.replace("width: int = 4", "width: int"), "", (), r"Waves\(\) in task.py raised TypeError"),
        (WAVES, "", ("widht=3",), "no attribute widht to set(.|\n)*width"),
        (WAVES, "", ("width=broad",), "--set width(.|\n)*an integer"),
    ],
)
def test_mistakes_name_the_file(tmp_path, content, name, values, text):
    if content is not None:
        (tmp_path / "task.py").write_text(content)
    with pytest.raises(ConfigError, match=text):
        load(f"{tmp_path / 'task.py'}{name}", *values)


def test_an_error_names_file_and_line_and_an_option_of_text_is_refused(waves, tmp_path):
    waves.write_text(WAVES.replace("return fields, ", "return fields, missing, "))
    with pytest.raises(
        ConfigError, match=r"Waves.batch in waves.py\(step=0, rows=0..3\) raised NameError(.|\n)*line 21"
    ):
        train(TaskFileConfig(**KEYS, task=str(waves), out=str(tmp_path / "run")))
    waves.write_text(WAVES.replace("def batch", "def patch"))
    with pytest.raises(
        ConfigError, match=r"Waves.batch in waves.py\(step=0, rows=0..3\) raised NotImplementedError: every"
    ):
        train(TaskFileConfig(**KEYS, task=str(waves), out=str(tmp_path / "run")))
    with pytest.raises(ConfigError, match="dim is an option of text"):
        load_config(str(waves), None, dim=8)


DOUBLED = """

class Doubled(nn.Gelu):
    def backward_input(self, dy, saved):
        dx, pending = super().backward_input(dy, saved)
        return 2 * dx, pending
"""


def test_check_names_the_layer_and_the_loss_whose_gradient_is_wrong(waves, alone, capsys):
    assert invoke("train", str(waves), "--check").code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "layers[0] Linear", "layers[1] Gelu", "layers[2] Linear", "loss", "mpipipe"]  # fmt: skip
    loss = "def loss(self, output, target):\n        return float(((output - target) ** 2).mean()), output - target"
    wrong = WAVES.replace("nn.Gelu()", "Doubled()").replace("loss = staticmethod(nn.mean_squared_error)", loss)
    waves.write_text(wrong + DOUBLED)
    assert invoke("train", f"{waves}:Waves", "--check").code == 1
    lines = capsys.readouterr().out.splitlines()
    assert "layers[1] Doubled: gradient of input: " in lines[1] and ", 2 of the difference" in lines[1]
    assert "right to" in lines[2] and "loss: gradient of input: " in lines[-2] and ", 3 of" in lines[-2]
    assert lines[-1] == "mpipipe: check failed in float64"
    assert "--check is for a task of your own" in invoke("train", "--check").report
