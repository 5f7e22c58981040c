"""`generate` and `evaluate` on text, for a model with a tokenizer: where the library `tokenizers` is installed."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from support import huggingface_reference as reference

tokenizers = pytest.importorskip("tokenizers")
TEXTS = ["the cat sat on the mat, and the dog sat on the cat. " * 4, "a mat is a mat: gr\u00fc\u00df dich! " * 3]


@pytest.fixture
def mpipipe(launch):
    """mpipipe(ranks, arguments): the output of a job that runs `python -m mpipipe arguments`."""

    def run(ranks, *arguments):
        job = launch(ranks, ["-m", "mpipipe", *map(str, arguments)])
        assert job.returncode == 0, job.stderr
        return job.stdout

    return run


@pytest.fixture
def made(tmp_path):
    """(folder of a model with a tokenizer, its config, the tokenizer)."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=290, special_tokens=["<end>"], initial_alphabet=alphabet)
    library.train_from_iterator(TEXTS, trainer)
    config = {**reference.CONFIGS["llama"], "vocab_size": 300, "eos_token_id": 0}
    folder = reference.write_folder(tmp_path / "model", config, reference.tensors_of(config))
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder, config, library


@pytest.mark.slow
def test_a_prompt_of_text_is_continued_in_text(mpipipe, made):
    folder, config, library = made
    prompt = "gr\u00fc\u00df the cat"
    tokens = library.encode(prompt).ids
    while len(tokens) < 30 and tokens[-1] != 0:
        logits = reference.logits(config, reference.tensors_of(config), np.array([tokens]))
        tokens.append(int(np.argmax(logits[0, -1])))
    count = 30 - len(library.encode(prompt).ids)
    text = mpipipe(2, "generate", folder, "--prompt", prompt, "--temperature", 0, "--count", count)
    assert text.startswith(prompt) and text.endswith("\n")
    expected = library.decode(tokens, skip_special_tokens=True)
    assert text == "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in expected) + "\n"


@pytest.mark.slow
def test_text_and_its_file_of_tokens_have_the_loss_of_the_tokens(mpipipe, made, tmp_path):
    folder, config, library = made
    losses = []
    for text in TEXTS:
        ids = np.array([*library.encode(text).ids, 0])
        for start in range(0, len(ids) - 1, 24):
            window = ids[start : start + 25]
            logits = reference.logits(config, reference.tensors_of(config), window[None, :-1])[0]
            sums = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
            losses.extend(sums - logits[np.arange(len(window) - 1), window[1:]])
    texts = [str(tmp_path / f"{number}.txt") for number in range(2)]
    mpipipe(2, "tokenize", "--tokenizer", folder, *texts, "--out", tmp_path / "tokens")
    options = ("--by-document", "--seq-len", 24)
    from_text = mpipipe(2, "evaluate", folder, "--data", texts[0], "--data", texts[1], *options)
    from_tokens = mpipipe(1, "evaluate", folder, "--data", tmp_path / "tokens", *options)
    assert from_text == from_tokens
    found = re.search(r"evaluated tokens=(\d+) loss=([\d.]+)", from_text)
    assert int(found[1]) == len(losses) and abs(float(found[2]) - np.mean(losses)) < 1e-8
    nbytes, count = sum(len(text.encode()) for text in TEXTS), len(losses) + len(TEXTS)
    assert f"{np.mean(losses) / np.log(2) * count / nbytes:.6f} bits per byte" in from_text
