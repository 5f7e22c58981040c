"""The configuration of the training of a language model: options of its data and model."""

from __future__ import annotations

from dataclasses import dataclass

from mpipipe.errors import ConfigError
from mpipipe.train import TaskConfig, document, option

# what a folder says, with `from`
FROM_FOLDER = ("vocab", "dim", "layers", "heads", "kv_heads", "hidden", "tied", "rope_base")


@dataclass(frozen=True)
class DataOptions:
    """Text or tokens."""

    heading = "data"

    data: tuple[str, ...] = option(
        (),
        "file or folder of text, or file of tokens; repeatable; default: the standard library's "
        "source",
        metavar="PATH",
    )
    tokenizer: str | None = option(
        None,
        "folder of the tokenizer of the tokens, which is compared with theirs and shows them as "
        "text",
        metavar="PATH",
        decides=True,
    )
    packing: str = option(
        "none",
        "attention at the ends of documents: none: it crosses them; segments: it stays within each",
        choices=("none", "segments"),
        decides=True,
    )
    order: str = option(
        "random",
        "windows to train on: random: anywhere, with replacement; epoch: each once in an epoch, "
        "in a new order",
        choices=("random", "epoch"),
        decides=True,
    )
    vocab: int | None = option(
        None,
        "token ids of the model; default: those of the data, 256 for bytes",
        least=1,
        decides=True,
    )
    layout: str = option(
        "zigzag",
        "which positions of a sequence each rank of seq holds",
        choices=("zigzag", "contiguous", "striped"),
    )
    seq_len: int = option(128, "bytes or tokens in a sequence", least=1, decides=True)


@dataclass(frozen=True)
class ModelOptions:
    """The model, and where its weights come from."""

    heading = "model"

    dim: int = option(128, "width of the model", least=1, decides=True)
    layers: int = option(4, "transformer blocks", least=1, decides=True)
    heads: int = option(4, "attention heads", least=1, decides=True)
    kv_heads: int | None = option(
        None, "key and value heads; default: as many as heads", least=1, decides=True
    )
    hidden: int | None = option(
        None, "inner width of SwiGLU; default: 8/3 dim, rounded up to 64", least=1, decides=True
    )
    tied: bool = option(False, "one matrix for embedding and head", decides=True)
    head_slices: int | None = option(
        None,
        "slices of the vocabulary into which the head is cut, so that stages divide it; default: "
        "those of the folder with from, else 1",
        least=1,
        decides=True,
    )
    dropout: float = option(
        0.0,
        "probability of dropping a value after attention and SwiGLU",
        least=0,
        below=1,
        decides=True,
    )
    rope_base: float = option(
        10000.0, "base of the rotary position embedding", above=1, decides=True
    )
    from_: str | None = option(
        None,
        "checkpoint, output folder of a training, or folder of Hugging Face, whose architecture "
        "and weights to begin with",
        metavar="PATH",
    )
    freeze: tuple[str, ...] = option(
        (),
        "pattern of names of parameters to freeze, such as '0.*'; repeatable; the last match "
        "counts, and a leading ! keeps them trained",
        decides=True,
    )
    lora: str | None = option(
        None,
        "train only low-rank adapters: rank,alpha,target,... such as 8,16,q_proj,v_proj, or the "
        "folder of an adapter of PEFT to continue with",
        decides=True,
    )
    sample_bytes: int = option(200, "bytes or tokens of text to generate at the end", least=0)


@dataclass(frozen=True)
class TrainConfig(TaskConfig, ModelOptions, DataOptions):
    """The configuration of one training of a language model.

    Field names are the keys of a TOML file and, with dashes, the flags of `mpipipe train`. Every
    field has a default.

    Raises
    ------
    ConfigError
        For a value of the wrong type or out of its range.
    """

    @classmethod
    def _check_given(cls, values: dict[str, object]) -> None:
        sizes = [*filter(values.__contains__, FROM_FOLDER)]
        if values.get("from_") is not None and sizes:
            raise ConfigError(
                f"{sizes[0]} and from are both given",
                found=f"{sizes[0]} = {values[sizes[0]]}, from {values['from_']}",
                expected="one of them: the architecture comes from the folder",
                remedy=f"leave out {' and '.join(sizes)}",
            )


document(TrainConfig)
