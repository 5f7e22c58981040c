"""A small training on text that is easy to learn, and what is compared of two of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mpipipe.language.models import GPT
from mpipipe.train import TrainConfig

MODEL = GPT(dim=16, layers=2, heads=2, hidden=32, seq=16)  # what it trains, with batches of 8
SMALL = dict(
    dim=16, layers=2, heads=2, hidden=32, seq_len=16, batch=8, microbatches=2, warmup=2, lr=1e-2, log_every=1,
    eval_batches=1, sample_bytes=0, device="cpu",
)  # fmt: skip
CLOCKED = ("tokens_per_second", "bubble", "predicted", "time", "seconds")


def config_in(folder, comm=None, **always):
    """config(name, **keys): a small training in the folder `name`; collective where the ranks of `comm` share it."""
    if comm is None or comm.rank == 0:
        words = np.random.default_rng(0).choice(["one ", "two ", "three ", "four\n"], 1500)
        (folder / "text.txt").write_text("".join(words))
    if comm is not None:
        comm.Barrier()

    def make(name="run", **keys):
        small = {**SMALL, "data": [str(folder / "text.txt")], "out": str(folder / name), **always}
        return TrainConfig(**{**small, **keys})

    return make


def metrics(config):
    """What is in metrics.jsonl, a dict for each line."""
    return [json.loads(line) for line in Path(config.out, "metrics.jsonl").read_text().splitlines()]


def records(config):
    """The same without what was measured by the clock."""
    return [{key: value for key, value in line.items() if key not in CLOCKED} for line in metrics(config)]
