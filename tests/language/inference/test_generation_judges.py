"""Greedy answers of folders that transformers has written, against its own `generate`, by the command itself."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytestmark = pytest.mark.judges
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
FAMILIES = {
    "Llama": SIZES,
    "Mistral": SIZES | {"sliding_window": 32},
    "Qwen2": SIZES,
    "Qwen3": SIZES | {"head_dim": 16},
    "GPT2": dict(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=512),
}
PROMPTS = [np.random.default_rng(length).integers(3, 96, length).tolist() for length in (5, 40, 1)]
COUNT = 256


def made(family, folder, dtype):
    """The folder of a random model, and the greedy answers of transformers, with how they end."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # the likeliest tokens of a new model are far too alike
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    options = dict(max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
    return [model.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_greedy_tokens_are_those_of_transformers_on_any_ranks(launch, tmp_path, family, dtype):
    folder, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    expected = made(family, folder, dtype)
    prompts.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    for ranks, seq in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
        options = ["--prompts", str(prompts), "--count", str(COUNT), "--temperature", "0", "--seq", str(seq)]
        job = launch(ranks, ["-m", "mpipipe", "generate", str(folder), *options], timeout=120)
        assert job.returncode == 0, job.stderr
        found = [list(map(int, line.split(","))) for line in re.findall(r"^mpipipe: tokens (.*)$", job.stdout, re.M)]
        assert found == expected, (ranks, seq)
