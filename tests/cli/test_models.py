"""`generate` and `evaluate` as users start them, on a folder with a model of bytes, and one of other tokens."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from support import huggingface_reference as reference
from support.harness import AT_LENGTH

BYTES = {**reference.CONFIGS["llama"], "vocab_size": 256}
OTHER = reference.CONFIGS["gpt2"]


@pytest.fixture
def mpipipe(launch):
    """mpipipe(ranks, arguments): a job that runs `python -m mpipipe arguments`."""
    return lambda ranks, *arguments, **options: launch(ranks, ["-m", "mpipipe", *map(str, arguments)], **options)


@pytest.fixture
def model(tmp_path):
    return reference.write_folder(tmp_path / "model", BYTES, reference.tensors_of(BYTES))


@pytest.fixture
def other(tmp_path):
    return reference.write_folder(tmp_path / "other", OTHER, reference.tensors_of(OTHER))


def whole(job):
    assert job.returncode == 0, job.stderr
    return job.stdout


def refused(job, match):
    assert job.returncode != 0
    assert len(re.findall(match, job.stderr)) == 1 and job.stderr.count("job ended by rank") == 1, job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.slow
def test_prompts_of_a_file_are_answered_as_one_by_one(mpipipe, model, tmp_path):
    prompts = ["a", "gr\u00fc\u00df dich", "import os, sys"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    options = ("--prompts", tmp_path / "prompts.txt", "--count", 9, "--temperature", 0, "--batch", 2)
    assert whole(mpipipe(2, "generate", model, *options, "--out", tmp_path / "a.jsonl")) == ""
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    printed = whole(mpipipe(4, "generate", model, *options, "--seq", 2)) if AT_LENGTH else None
    for number, (prompt, line) in enumerate(zip(prompts, lines)):
        assert (line["number"], line["prompt"], line["ended"]) == (number, prompt, "count")
        if number != 1 and not AT_LENGTH:
            continue
        alone = whole(mpipipe(1, "generate", model, "--prompt", prompt, "--bytes", 9, "--temperature", 0))
        both = bytes(line["prompt_tokens"] + line["answer_tokens"]).decode(errors="replace")
        shown = "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in both)
        assert alone == shown + "\n"
        assert printed is None or f"--- prompt {number}\n{alone}" in printed


@pytest.mark.slow
def test_ids_of_a_model_without_a_tokenizer_are_the_last_line(mpipipe, other):
    config, tokens = OTHER, [5, 17, 9]
    tensors = reference.tensors_of(config)
    for _ in range(8):
        tokens.append(int(np.argmax(reference.logits(config, tensors, np.array([tokens]))[0, -1])))
    lines = whole(mpipipe(2, "generate", other, "--tokens", "5,17,9", "--count", 8, "--temperature", 0)).splitlines()
    assert lines[-1] == "mpipipe: tokens " + ",".join(map(str, tokens))
    if not AT_LENGTH:
        return
    stopped = mpipipe(1, "generate", other, "--tokens", "5,17,9", "--temperature", 0, "--count", 8, "--stop", tokens[5])
    first = tokens.index(tokens[5], 3)
    assert whole(stopped).splitlines()[-1] == "mpipipe: tokens " + ",".join(map(str, tokens[: first + 1]))


@pytest.mark.slow
def test_what_cannot_be_continued_is_one_report(mpipipe, model, other, tmp_path):
    cases = [
        (other, ["--prompt", "a"], "the model has no tokenizer"),
        (other, ["--tokens", "5", "--count", "70"], "longer than the model's learned positions"),
        (model, ["--prompts", tmp_path / "absent"], "the prompts cannot be read"),
        (other, ["--tokens", "5,48"], "has a token that the model does not know"),
        (model, ["--top-p", "0"], "top-p"),
        (model, ["--dtype", "float16"], "--dtype"),
        (tmp_path / "absent", [], "no model is here"),
    ]
    for place, options, match in cases if AT_LENGTH else cases[:1]:
        refused(mpipipe(2, "generate", place, *options), match)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]


def written_out(ids, length):
    """The losses of windows in plain numpy."""
    tensors, losses = reference.tensors_of(BYTES), []
    for start in range(0, (len(ids) - 1) // length * length, length):
        logits = reference.logits(BYTES, tensors, ids[None, start : start + length])[0]
        sums = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
        losses.extend(sums - logits[np.arange(length), ids[start + 1 : start + length + 1]])
    return losses


@pytest.mark.slow
def test_an_evaluation_says_the_loss_in_its_last_line(mpipipe, model, tmp_path):
    text = np.random.default_rng(0).integers(32, 127, 203).astype(np.uint8)
    (tmp_path / "a.txt").write_bytes(text.tobytes())
    losses = written_out(text.astype(int), 20)
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


@pytest.mark.slow
def test_documents_are_reported_each(mpipipe, model, tmp_path):
    for name, length in (("a.txt", 31), ("b.txt", 9)):
        (tmp_path / name).write_bytes(bytes(range(40, 40 + length)))
    data = ("--data", tmp_path / "a.txt", "--data", tmp_path / "b.txt", "--by-document", "--seq-len", 20)
    job = mpipipe(2, "evaluate", model, *data, "--out", tmp_path / "found.jsonl")
    assert "tokens=38 " in whole(job)
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [(line.get("document"), line["tokens"]) for line in lines] == [(0, 30), (1, 8), (None, 38)]
    nats = sum(line["tokens"] * line["loss"] for line in lines[:2])
    assert abs(nats / 38 - lines[2]["loss"]) < 1e-12


@pytest.mark.slow
def test_what_cannot_be_evaluated_is_one_report(mpipipe, model, other, tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(40, 60)))
    np.save(tmp_path / "ids.npy", np.array([1, 2, 48, 3] * 30))
    cases = [
        (model, ["--data", tmp_path / "a.txt", "--seq-len", 20], "too short for one window"),
        (other, ["--data", tmp_path / "ids.npy"], "a token id is out of range"),
        (model, [], "nothing to evaluate on"),
        (model, ["--data", tmp_path / "absent"], "data cannot be read"),
        (model, ["--data", tmp_path / "a.txt", "--seq-len", 65, "--by-document"], "longer than the model"),
        (other, ["--data", tmp_path / "a.txt"], "the model has no tokenizer"),
        (model, ["--data", tmp_path / "a.txt", "--layout", "round", "--seq-len", 4], "layout"),
        (tmp_path / "absent", ["--data", tmp_path / "a.txt"], "no model is here"),
    ]
    for place, options, match in cases if AT_LENGTH else cases[:1]:
        refused(mpipipe(2, "evaluate", place, *options), match)
