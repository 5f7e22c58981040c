"""`evaluate` and `convert` as users start them, on folders with models of bytes."""

import json
import os
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


# -- text becomes tokens, and tokens a model ---------------------------------------------------------------------------


SMALL = ["--dim", "16", "--layers", "2", "--heads", "2", "--seq-len", "16", "--batch", "8", "--microbatches", "2",
         "--steps", "2", "--eval-batches", "1", "--sample-bytes", "6"]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """The folder of a tokenizer of words, and a file of JSON lines."""
    library = pytest.importorskip("tokenizers")
    words = ["<end>", "<unk>", *(f"word{number}" for number in range(30))]
    made = library.Tokenizer(library.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(words[2:], 12)) for _ in range(300)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


@pytest.mark.long
def test_text_becomes_tokens_and_tokens_a_model(mpipipe, folder):
    out, text = str(folder / "tokens"), str(folder / "texts.jsonl")
    job = mpipipe(0, "tokenize", text, "--tokenizer", str(folder), "--out", out)
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    size = os.path.getsize(text)
    assert lines[-2] == f"mpipipe: {size:,} of {size:,} bytes of text"
    assert re.fullmatch(
        r"mpipipe: tokenized files=1 documents=300 tokens=3900 bytes=\d+ vocabulary=32 end_of_text=0 MB/s=\d+\.\d\d "
        rf"into {out}", lines[-1],
    )  # fmt: skip
    options = ("--data", out, "--tokenizer", str(folder), "--packing", "segments", "--order", "epoch")
    job = mpipipe(2, "train", *options, *SMALL, "--out", str(folder / "run"))
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    assert re.search(r"^step \d+/\d+  loss \d\.\d{4}  bits/byte \d\.\d{4}  ", job.stdout, re.MULTILINE)
    assert re.search(r"^step \d+/\d+  validation \d\.\d{4}  bits/byte \d\.\d{4}$", job.stdout, re.MULTILINE)
    assert re.search(r" predicted=\d\.\d{4} bits/byte=\d\.\d{4}$", lines[-1])
    assert "--- sample (prompt: " in job.stdout and re.search(r"^word\d+ word\d+ ", job.stdout, re.MULTILINE)
