"""`evaluate` and `convert` as users start them, on folders with models of bytes."""

import json
import re

import numpy as np
import pytest
from support import huggingface_reference as reference
from support.command_line import invoke

from mpipipe import nn
from mpipipe.job import settings

BYTES = {**reference.CONFIGS["llama"], "vocab_size": 256}
WITHOUT_MPI = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}


@pytest.fixture
def source(tmp_path):
    """A folder of a Llama of 256 token ids, which reads bytes."""
    return reference.write_folder(tmp_path / "source", BYTES, reference.tensors_of(BYTES))


@pytest.mark.long
def test_an_evaluation_says_the_loss_in_its_last_line(mpipipe, source, tmp_path):
    text = np.random.default_rng(0).integers(32, 127, 203).astype(np.uint8)
    (tmp_path / "a.txt").write_bytes(text.tobytes())
    windows, targets = (text[start : start + 200].astype(int).reshape(10, 20) for start in (0, 1))
    loss, _ = nn.softmax_cross_entropy(reference.logits(BYTES, reference.tensors_of(BYTES), windows), targets)
    job = mpipipe(4, "evaluate", source, "--data", tmp_path / "a.txt", "--seq-len", 20, "--pipe", 2)
    assert job.returncode == 0, job.stderr
    last = re.fullmatch(
        r"mpipipe: evaluated tokens=(\d+) loss=([\d.]+) perplexity=([\d.]+)", job.stdout.splitlines()[-1]
    )
    assert int(last[1]) == 200
    assert abs(float(last[2]) - loss) < 1e-8  # eight digits are printed
    assert abs(float(last[3]) - np.exp(loss)) < 1e-6
    assert f"{loss / np.log(2):.6f} bits per byte" in job.stdout


def test_convert_writes_another_dtype_without_mpi(mpipipe, tmp_path, source):
    words = "convert", source, tmp_path / "new", "--shard-bytes", "9000", "--dtype", "float32"
    done = mpipipe(0, *words, env=WITHOUT_MPI)
    assert done.returncode == 0, done.stderr
    said = f"mpipipe: converted {source} (huggingface) into {tmp_path / 'new'}: LlamaForCausalLM in float32"
    assert done.stdout.startswith(said)
    before, after = (reference.tensors_in(tmp_path / name) for name in ("source", "new"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor.astype(np.float32))


@pytest.mark.parametrize(("ranks", "said"), [(None, "the option new_option of a model folder is not known"),
                                              (("mpiexec", 2), "convert is for one process")])  # fmt: skip
def test_convert_is_refused_in_one_report(monkeypatch, tmp_path, source, ranks, said):
    monkeypatch.setattr(settings, "launcher_size", lambda environment: ranks)
    (source / "config.json").write_text(json.dumps({**reference.CONFIGS["llama"], "new_option": 3}))
    ended = invoke("convert", str(source), str(tmp_path / "ours"))
    assert ended.code == 2 and said in ended.report
    assert ranks or f"found: new_option = 3 in {source}" in ended.report
    assert not (tmp_path / "ours").exists()
