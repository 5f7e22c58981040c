"""Fine-tuning against `transformers` with the AdamW of PyTorch: the same losses, step by step, and the same model."""

from pathlib import Path

import numpy as np
import pytest
from support import transformers_judge as judge
from support.harness import on_rank_0
from support.small_training import metrics
from support.windows import training_batch, validation_batch

from mpipipe import optim
from mpipipe.language import data
from mpipipe.language.models import GPT
from mpipipe.language.models.model_folder import convert
from mpipipe.train import TrainConfig, train

pytestmark = pytest.mark.judges
STEPS, VOCAB, LENGTH, BATCH, LR, WARMUP, CLIP, DECAY = 20, 97, 24, 8, 1e-3, 4, 0.5, 0.1
CASES = ["Llama 3", "SmolLM", "Mistral", "Qwen2", "Qwen3", "GPT-2"]


@pytest.fixture
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


@pytest.fixture
def source():
    """Tokens that can be learned: each follows from the one before, but for a tenth of them."""
    rng, ids = np.random.default_rng(0), [0]
    for noise in rng.integers(0, 10 * VOCAB, 5000):
        ids.append(int(noise) if noise < VOCAB else (5 * ids[-1] + 3) % VOCAB)
    return data.Source.of_arrays(np.array(ids[:4500]), np.array(ids[4500:]), vocab=VOCAB)


def train_there(torch, model, source):
    """Train as a script of PyTorch would, with the same windows; return the losses."""
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        inputs, targets = training_batch(
            source.train, seed=0, step=step, batch=BATCH, rows=slice(0, BATCH), seq_len=LENGTH
        )
        for group in optimizer.param_groups:
            group["lr"] = optim.warmup_cosine(step, STEPS, LR, WARMUP)
        optimizer.zero_grad()
        logits = model(torch.tensor(inputs)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", CASES)
def test_twenty_steps_equal_those_of_transformers_with_adamw(torch, comm, mpi_tmp_path, source, family):
    import transformers

    folder, out = Path(mpi_tmp_path, "model"), Path(mpi_tmp_path, "run")
    model = judge.make(family, "float32")
    on_rank_0(comm, model.save_pretrained, folder)
    config = TrainConfig(
        from_=str(folder), out=str(out), seq_len=LENGTH, batch=BATCH, microbatches=4, steps=STEPS, lr=LR, warmup=WARMUP,
        clip=CLIP, weight_decay=DECAY, log_every=1, eval_every=STEPS, eval_batches=1, sample_bytes=0, device="cpu",
        pipe=comm.size,
    )  # fmt: skip
    train(config, GPT, comm, data=source)
    if comm.rank:
        return
    convert(out, out / "folder")
    expected = train_there(torch, model, source)
    lines = metrics(out)
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.1, "it learns"
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    inputs, targets = validation_batch(
        source.validation, index=0, batches=1, batch=BATCH, rows=slice(0, BATCH), seq_len=LENGTH
    )
    tuned = transformers.AutoModelForCausalLM.from_pretrained(out / "folder", dtype=torch.float32)
    for each in (model, tuned):
        with torch.no_grad():
            logits = each(torch.tensor(inputs)).logits.flatten(0, 1)
        validation = torch.nn.functional.cross_entropy(logits, torch.tensor(targets).flatten()).item()
        np.testing.assert_allclose(validation, lines[-1]["validation"], rtol=1e-5)
