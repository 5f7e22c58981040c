"""`generate`, `evaluate` and `convert` as users start them, on folders with models of bytes and of other tokens."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import huggingface_reference as reference
from support.command_line import invoke
from support.harness import AT_LENGTH
from support.token_files import write_megatron

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


@pytest.mark.long
def test_prompts_of_a_file_are_answered_as_one_by_one(mpipipe, model, tmp_path):
    prompts = ["a", "gr\u00fc\u00df dich", "import os, sys"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    options = ("--prompts", tmp_path / "prompts.txt", "--count", 9, "--temperature", 0, "--batch", 2)
    assert whole(mpipipe(2, "generate", model, *options, "--out", tmp_path / "a.jsonl")) == ""
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    printed = whole(mpipipe(4, "generate", model, *options)) if AT_LENGTH else None
    for number, (prompt, line) in enumerate(zip(prompts, lines)):
        assert (line["number"], line["prompt"], line["ended"]) == (number, prompt, "count")
        if number != 1 and not AT_LENGTH:
            continue
        alone = whole(mpipipe(1, "generate", model, "--prompt", prompt, "--bytes", 9, "--temperature", 0))
        both = bytes(line["prompt_tokens"] + line["answer_tokens"]).decode(errors="replace")
        shown = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in both)
        assert alone == shown + "\n"
        assert printed is None or f"--- prompt {number}\n{alone}" in printed


@pytest.mark.long
def test_ids_of_a_model_without_a_tokenizer_are_the_last_line(mpipipe, other, tmp_path):
    config, tokens = OTHER, [5, 17, 9]
    tensors = reference.tensors_of(config)
    for _ in range(8):
        tokens.append(int(np.argmax(reference.logits(config, tensors, np.array([tokens]))[0, -1])))
    prompts = ids_prompt(tmp_path, tokens[:3])
    lines = whole(mpipipe(2, "generate", other, "--prompts", prompts, "--count", 8, "--temperature", 0)).splitlines()
    assert lines[-1] == "mpipipe: tokens " + ",".join(map(str, tokens))


def test_what_cannot_be_continued_is_one_report(mpipipe, model, other, tmp_path):
    cases = [
        (other, ["--prompt", "a"], "the model has no tokenizer"),
        (
            other,
            ["--prompts", ids_prompt(tmp_path, [5], "short"), "--count", "70"],
            "longer than the model's learned positions",
        ),
        (model, ["--prompts", tmp_path / "absent"], "the prompts cannot be read"),
        (other, ["--prompts", ids_prompt(tmp_path, [5, 48], "strange")], "has a token that the model does not know"),
        (tmp_path / "absent", [], "no model is here"),
    ]
    for place, options, match in cases if AT_LENGTH else cases[:1]:
        refused(mpipipe(2, "generate", place, *options), match)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other", "short.jsonl", "strange.jsonl"]


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


def test_what_cannot_be_evaluated_is_one_report(mpipipe, model, other, tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(40, 60)))
    (tmp_path / "long.txt").write_bytes(b"text " * 40)
    write_megatron(tmp_path / "ids", [np.array([1, 2, 48, 3] * 30)], [0, 1])
    cases = [
        (model, ["--data", tmp_path / "a.txt", "--seq-len", 20], "too short for one window"),
        (other, ["--data", tmp_path / "ids"], "a token id is out of range"),
        (model, [], "nothing to evaluate on"),
        (model, ["--data", tmp_path / "absent"], "data cannot be read"),
        (model, ["--data", tmp_path / "long.txt", "--seq-len", 65], "longer than the model"),
        (other, ["--data", tmp_path / "a.txt"], "the model takes tokens, and no text"),
        (tmp_path / "absent", ["--data", tmp_path / "a.txt"], "no model is here"),
    ]
    for place, options, match in cases if AT_LENGTH else cases[:1]:
        refused(mpipipe(2, "evaluate", place, *options), match)


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
    whole(mpipipe(2, "tokenize", "--tokenizer", folder, *texts, "--out", tmp_path / "tokens"))
    printed = whole(mpipipe(2, "evaluate", folder, "--data", tmp_path / "tokens", "--seq-len", 24))
    found = re.search(r"evaluated tokens=(\d+) loss=([\d.]+)", printed)
    assert int(found[1]) == len(losses) and abs(float(found[2]) - np.mean(losses)) < 1e-8
    nbytes = sum(len(text.encode()) for text in TEXTS)
    assert f"{np.mean(losses) / np.log(2) * len(ids) / nbytes:.6f} bits per byte" in printed
    refused(mpipipe(2, "evaluate", folder, "--data", texts[0]), "the model takes tokens, and no text")


# -- Folders: convert without MPI, train from one and leave one -------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    """A folder of a Llama of 256 token ids, which reads bytes."""
    return reference.write_folder(tmp_path / "source", BYTES, reference.tensors_of(BYTES))


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
    (source / "config.json").write_text(json.dumps({**reference.CONFIGS["llama"], "new_option": 3}))
    ended = invoke("convert", str(source), str(tmp_path / "ours"))
    assert ended.code == 2 and said in ended.report
    assert ranks or f"found: new_option = 3 in {source}" in ended.report
    assert not (tmp_path / "ours").exists()


@pytest.mark.long
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
    prompts = ids_prompt(tmp_path, [5, 17, 9])
    job = mpipipe(2, "generate", out, "--prompts", prompts, "--count", "4", "--temperature", "0")
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines()[-1].startswith("mpipipe: tokens 5,17,9,")
