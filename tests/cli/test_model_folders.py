"""Model folders at the command line: convert without MPI, train from one and leave one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import huggingface_reference as theirs
from support.command_line import invoke

from mpipipe.job import settings

WITHOUT_MPI = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}


@pytest.fixture
def mpipipe(launch):
    """mpipipe(ranks, arguments): a job that runs `python -m mpipipe arguments`."""
    return lambda ranks, *arguments, **options: launch(ranks, ["-m", "mpipipe", *arguments], **options)


@pytest.fixture
def source(tmp_path):
    """A folder of a Llama of 256 token ids, which reads bytes."""
    config = {**theirs.CONFIGS["llama"], "vocab_size": 256}
    return theirs.write_folder(tmp_path / "source", config, theirs.tensors_of(config))


def test_convert_goes_there_and_back_without_mpi(mpipipe, tmp_path, source):
    there = mpipipe(0, "convert", source, tmp_path / "ours", "--shard-bytes", "9000", env=WITHOUT_MPI)
    assert there.returncode == 0, there.stderr
    assert there.stdout.startswith(
        f"mpipipe: converted {source} (huggingface) into {tmp_path / 'ours'}: weights in float64"
    )
    back = mpipipe(0, "convert", tmp_path / "ours", tmp_path / "back", "--dtype", "float32", env=WITHOUT_MPI)
    assert back.returncode == 0, back.stderr
    assert "(weights) into" in back.stdout and "LlamaForCausalLM in float32" in back.stdout
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "back"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor.astype(np.float32))


@pytest.mark.parametrize(("ranks", "said"), [(None, "the option new_option of a model folder is not known"),
                                              (("mpiexec", 2), "convert is for one process")])  # fmt: skip
def test_convert_is_refused_in_one_report(monkeypatch, tmp_path, source, ranks, said):
    monkeypatch.setattr(settings, "launcher_size", lambda environment: ranks)
    (source / "config.json").write_text(json.dumps({**theirs.CONFIGS["llama"], "new_option": 3}))
    ended = invoke("convert", str(source), str(tmp_path / "ours"))
    assert ended.code == 2 and said in ended.report
    assert ranks or f"found: new_option = 3 in {source}" in ended.report
    assert not (tmp_path / "ours").exists()


def test_train_from_a_folder_leaves_one_that_is_generated_from(mpipipe, tmp_path, source):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("one two three four " * 100)
    small = ["--seq-len", 8, "--batch", 4, "--microbatches", 2, "--steps", 2, "--eval-batches", 1, "--sample-bytes", 4]
    flags = ["--from", source, "--data", text, "--out", out, "--save-as", "huggingface", "--save-dtype", "bfloat16"]
    job = mpipipe(2, "train", *flags, *small, "--device", "cpu")
    assert job.returncode == 0, job.stderr
    assert f"mpipipe: begins with the model in {source}\n" in job.stdout
    assert "--- sample: 32 bytes of validation text, 4 of the model's" in job.stdout
    config = json.loads((out / "huggingface" / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"], config["vocab_size"]) == ("llama", "bfloat16", 256)
    job = mpipipe(2, "generate", out, "--tokens", "5,17,9", "--count", "4", "--temperature", "0")
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines()[-1].startswith("mpipipe: tokens 5,17,9,")
