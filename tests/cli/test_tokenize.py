"""Tokenizing and training on tokens as users start them."""

import json
import os
import re

import numpy as np
import pytest

library = pytest.importorskip("tokenizers")
SMALL = ["--dim", "16", "--layers", "2", "--heads", "2", "--seq-len", "16", "--batch", "8", "--microbatches", "2",
         "--steps", "2", "--eval-batches", "1", "--sample-bytes", "6"]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """The folder of a tokenizer of words, and a file of JSON lines."""
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
