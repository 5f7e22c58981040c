"""The peak of resident memory that a dry run predicts, against that of a real training on two ranks."""

import re
import runpy

import pytest
from support.launch import ROOT

JOB = """
import atexit, runpy, sys
from mpipipe.planning.memory import peak
atexit.register(lambda: print("peak", peak(), file=sys.stderr))
sys.argv = ["mpipipe", *{arguments}]
runpy.run_module("mpipipe", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["darcy", "weather", pytest.param("unet", marks=pytest.mark.judges)])
def test_a_training_takes_what_is_predicted_to_ten_percent(launch, tmp_path, name):
    values = []
    if name == "weather":
        pytest.importorskip("h5py")
        data = str(tmp_path / "weather.h5")
        runpy.run_path(str(ROOT / "docs" / "tasks" / "weather.py"))["write"](data, members=16, days=4)
        values = ["--set", f"data={data}", "--set", "members=16", "--set", "days=4"]
    elif name == "unet":
        pytest.importorskip("torch")
    task = ["train", str(ROOT / "docs" / "tasks" / f"{name}.py"), *values, "--pipe", "2", "--batch", "16"]
    trained = [*task, "--steps", "2", "--out", str(tmp_path / "run")]
    job = launch(2, JOB.format(arguments=trained), timeout=240)
    assert job.returncode == 0, job.stderr
    peaks = [int(found) / 2**20 for found in re.findall(r"peak (\d+)", job.stderr)]
    dry = launch(0, ["-m", "mpipipe", *task, "--dry-run", "--ranks", "2"], timeout=240)
    assert dry.returncode == 0, dry.stderr
    predicted = [float(total) for total in re.findall(r"^ +[01] .* (\d+\.\d)$", dry.stdout, re.MULTILINE)]
    assert len(peaks) == 2 and sorted(predicted) == pytest.approx(sorted(peaks), rel=0.1)
