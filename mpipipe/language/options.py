"""The options of the training of a language model: its model, and its data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from mpipipe.options import option


@dataclass(frozen=True)
class DataOptions:
    """Text or tokens."""

    heading: ClassVar[str] = "data"

    data: tuple[str, ...] = option(
        (),
        "file or folder of text, or file of tokens; repeatable; default: the standard library's source",
        metavar="PATH",
    )
    tokenizer: str | None = option(
        None,
        "folder of the tokenizer of the tokens, which is compared with theirs and shows them as text",
        metavar="PATH",
        decides=True,
    )
    packing: str = option(
        "none",
        "what attention does at the ends of documents: none: it goes on across them; segments: it stays within each",
        choices=("none", "segments"),
        decides=True,
    )
    order: str = option(
        "random",
        "windows to train on: random: anywhere, with replacement; epoch: each once in an epoch, in a new order",
        choices=("random", "epoch"),
        decides=True,
    )
    vocab: int | None = option(
        None, "token ids of the model; default: those of the data, 256 for bytes", least=1, decides=True
    )
    seq_len: int = option(128, "bytes or tokens in a sequence", least=1, decides=True)


@dataclass(frozen=True)
class ModelOptions:
    """The model, and where its weights come from."""

    heading: ClassVar[str] = "model"

    dim: int = option(128, "width of the model", least=1, decides=True)
    layers: int = option(4, "transformer blocks", least=1, decides=True)
    heads: int = option(4, "attention heads", least=1, decides=True)
    kv_heads: int | None = option(None, "key and value heads; default: as many as heads", least=1, decides=True)
    hidden: int | None = option(
        None, "inner width of SwiGLU; default: 8/3 dim, rounded up to 64", least=1, decides=True
    )
    tied: bool = option(False, "one matrix for embedding and head", decides=True)
    dropout: float = option(
        0.0, "probability of dropping a value after attention and SwiGLU", least=0, below=1, decides=True
    )
    rope_base: float = option(10000.0, "base of the rotary position embedding", above=1, decides=True)
    init: str | None = option(
        None,
        "checkpoint, output folder of a training, or folder of Hugging Face, whose weights to begin with",
        metavar="PATH",
    )
    from_: str | None = option(None, "such a folder, whose architecture and weights to begin with", metavar="PATH")
    freeze: tuple[str, ...] = option(
        (),
        "pattern of names of parameters that stay as they are, such as '0.*'; repeatable; the last that fits counts, "
        "one with ! in front keeps trained",
        decides=True,
    )
    lora: str | None = option(
        None,
        "train low-rank adapters alone: rank,alpha,target,... such as 8,16,q_proj,v_proj, or the folder of an adapter "
        "of PEFT to go on with",
        decides=True,
    )
    save_as: str = option(
        "mpipipe",
        "format of the model at the end: mpipipe in weights/, huggingface in huggingface/",
        choices=("mpipipe", "huggingface"),
    )
    save_dtype: str | None = option(
        None,
        "dtype of a model that is saved as huggingface: float32, bfloat16, float16 or float64; default: that of the "
        "parameters",
        choices=("float32", "bfloat16", "float16", "float64"),
    )
    sample_bytes: int = option(200, "bytes or tokens of text to generate at the end", least=0)
    temperature: float = option(
        0.8, "of the generated text; 0 takes the likeliest byte or token", least=0, below=math.inf
    )


# what other programs call these options
OTHER_NAMES = {
    "attention_heads": "heads",
    "block_size": "seq_len",
    "context_length": "seq_len",
    "d_model": "dim",
    "data_path": "data",
    "hidden_size": "dim",
    "intermediate_size": "hidden",
    "max_seq_len": "seq_len",
    "n_embd": "dim",
    "n_head": "heads",
    "n_heads": "heads",
    "n_layer": "layers",
    "n_layers": "layers",
    "num_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_layers": "layers",
    "rope_theta": "rope_base",
    "sequence_length": "seq_len",
    "vocab_size": "vocab",
}
