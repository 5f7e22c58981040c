"""Options of a training: text or tokens."""

from __future__ import annotations

from dataclasses import dataclass

from mpipipe.train.options.option import option


@dataclass(frozen=True)
class DataOptions:
    """Text or tokens."""

    data: tuple[str, ...] = option(
        (),
        "file or folder of text, or file of tokens; repeatable; default: the standard library's source",
        metavar="PATH",
    )
    tokenizer: str | None = option(
        None,
        "folder of the tokenizer of the tokens, which is compared with theirs and shows them as text",
        metavar="PATH",
    )
    packing: str = option(
        "none",
        "what attention does at the ends of documents: none: it goes on across them; segments: it stays within each",
        choices=("none", "segments"),
    )
    order: str = option(
        "random",
        "windows to train on: random: anywhere, with replacement; epoch: each once in an epoch, in a new order",
        choices=("random", "epoch"),
    )
    vocab: int | None = option(None, "token ids of the model; default: those of the data, 256 for bytes", least=1)
    seq_len: int = option(128, "bytes or tokens in a sequence", least=1)
