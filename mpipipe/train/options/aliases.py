"""What other programs call the options of a training: for the question what a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIASES = {
    "attention_heads": "heads",
    "batch_size": "batch",
    "checkpoint_every": "save_every",
    "checkpointing": "recompute",
    "context_length": "seq_len",
    "d_model": "dim",
    "data_path": "data",
    "global_batch_size": "batch",
    "grad_clip": "clip",
    "gradient_checkpointing": "recompute",
    "hidden_size": "dim",
    "intermediate_size": "hidden",
    "learning_rate": "lr",
    "max_grad_norm": "clip",
    "max_norm": "clip",
    "max_steps": "steps",
    "micro_batches": "microbatches",
    "n_heads": "heads",
    "n_layers": "layers",
    "num_heads": "heads",
    "num_layers": "layers",
    "num_microbatches": "microbatches",
    "output": "out",
    "output_dir": "out",
    "pipeline_parallel_size": "pipe",
    "context_parallel_size": "seq",
    "precision": "dtype",
    "rope_theta": "rope_base",
    "sequence_length": "seq_len",
    "train_steps": "steps",
    "vocab_size": "vocab",
    "warmup_steps": "warmup",
}


def near(key: str, known: Iterable[str]) -> list[str]:
    """Return the options that are called like `key`, or that other programs call so."""
    known, key = list(known), key.replace("-", "_").lower()
    meant = ALIASES.get(key)
    return [meant] if meant in known else difflib.get_close_matches(key, known, n=3)
