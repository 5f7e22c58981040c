"""`generate`, `evaluate` and `convert` as users start them, on folders with models of bytes and of other tokens."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from support import huggingface_reference as reference
from support.command_line import invoke
from support.harness import AT_LENGTH

from mpipipe.job import settings

BYTES = {**reference.CONFIGS["llama"], "vocab_size": 256}
OTHER = reference.CONFIGS["gpt2"]
WITHOUT_MPI = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
TEXTS = ["the cat sat on the mat, and the dog sat on the cat. " * 4, "a mat is a mat: gr\u00fc\u00df dich! " * 3]


@pytest.fixture
def model(tmp_path):
    return reference.write_folder(tmp_path / "model", BYTES, reference.tensors_of(BYTES))


@pytest.fixture
def other(tmp_path):
    return reference.write_folder(tmp_path / "other", OTHER, reference.tensors_of(OTHER))


def whole(job):
    assert job.returncode == 0, job.stderr
    return job.stdout


def ids_prompt(folder, ids, name="ids"):
    """A file of one prompt of token ids."""
    path = folder / f"{name}.jsonl"
    path.write_text(json.dumps({"tokens": ids}))
    return path


def refused(job, match):
    assert job.returncode != 0
    assert len(re.findall(match, job.stderr)) == 1 and job.stderr.count("job ended by rank") == 1, job.stderr
    assert "Traceback" not in job.stderr


def written_out(config, ids, length):
    """The losses of windows in plain numpy; what does not fill the last one is left out."""
    tensors, losses = reference.tensors_of(config), []
    for start in range(0, (len(ids) - 1) // length * length, length):
        window = ids[start : start + length + 1]
        logits = reference.logits(config, tensors, window[None, :-1])[0]
        sums = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
        losses.extend(sums - logits[np.arange(len(window) - 1), window[1:]])
    return losses


@pytest.mark.long
def test_an_evaluation_says_the_loss_in_its_last_line(mpipipe, model, tmp_path):
    text = np.random.default_rng(0).integers(32, 127, 203).astype(np.uint8)
    (tmp_path / "a.txt").write_bytes(text.tobytes())
    losses = written_out(BYTES, text.astype(int), 20)
    meshes = [(4, ["--pipe", 2]), (1, []), (4, ["--seq", 2]), (2, ["--pipe", 1])]
    for ranks, options in meshes if AT_LENGTH else meshes[:1]:
        job = mpipipe(ranks, "evaluate", model, "--data", tmp_path / "a.txt", "--seq-len", 20, *options)
        last = re.fullmatch(
            r"mpipipe: evaluated tokens=(\d+) loss=([\d.]+) perplexity=([\d.]+)", whole(job).splitlines()[-1]
        )
        assert int(last[1]) == len(losses) == 200
        assert abs(float(last[2]) - np.mean(losses)) < 1e-8  # eight digits are printed
        assert abs(float(last[3]) - np.exp(np.mean(losses))) < 1e-6
        assert f"{np.mean(losses) / np.log(2):.6f} bits per byte" in job.stdout


# -- A model with a tokenizer ------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    """(folder of a model with a tokenizer, its config, the tokenizer)."""
    tokenizers = pytest.importorskip("tokenizers")
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


@pytest.mark.long
def test_a_prompt_of_text_is_continued_in_text(mpipipe, made):
    folder, config, library = made
    prompt = "gr\u00fc\u00df the cat"
    tokens = library.encode(prompt).ids
    while len(tokens) < 30 and tokens[-1] != 0:
        logits = reference.logits(config, reference.tensors_of(config), np.array([tokens]))
        tokens.append(int(np.argmax(logits[0, -1])))
    count = 30 - len(library.encode(prompt).ids)
    text = whole(mpipipe(2, "generate", folder, "--prompt", prompt, "--temperature", 0, "--count", count))
    assert text.startswith(prompt) and text.endswith("\n")
    expected = library.decode(tokens, skip_special_tokens=True)
    assert text == "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in expected) + "\n"


@pytest.mark.long
def test_a_file_of_tokens_has_the_loss_of_the_tokens_and_text_is_refused(mpipipe, made, tmp_path):
    folder, config, library = made
    ids = [token for text in TEXTS for token in [*library.encode(text).ids, 0]]
    losses = written_out(config, np.array(ids), 24)
    texts = [str(tmp_path / f"{number}.txt") for number in range(2)]
    whole(mpipipe(0, "tokenize", "--tokenizer", folder, *texts, "--out", tmp_path / "tokens"))
    printed = whole(mpipipe(2, "evaluate", folder, "--data", tmp_path / "tokens", "--seq-len", 24))
    found = re.search(r"evaluated tokens=(\d+) loss=([\d.]+)", printed)
    assert int(found[1]) == len(losses) and abs(float(found[2]) - np.mean(losses)) < 1e-8
    nbytes = sum(len(text.encode()) for text in TEXTS)
    assert f"{np.mean(losses) / np.log(2) * len(ids) / nbytes:.6f} bits per byte" in printed
    refused(mpipipe(2, "evaluate", folder, "--data", texts[0]), "the data are bytes, and the model has a tokenizer")


# -- Folders: convert without MPI, train from one -------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    """A folder of a Llama of 256 token ids, which reads bytes."""
    return reference.write_folder(tmp_path / "source", BYTES, reference.tensors_of(BYTES))


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
