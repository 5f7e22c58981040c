"""Options of a training: the model, and where its weights come from."""

from __future__ import annotations

from dataclasses import dataclass

from mpipipe.train.options.option import option


@dataclass(frozen=True)
class ModelOptions:
    """The model, and where its weights come from."""

    dim: int = option(128, "width of the model", least=1)
    layers: int = option(4, "transformer blocks", least=1)
    heads: int = option(4, "attention heads", least=1)
    kv_heads: int | None = option(None, "key and value heads; default: as many as heads", least=1)
    hidden: int | None = option(None, "inner width of SwiGLU; default: 8/3 dim, rounded up to 64", least=1)
    tied: bool = option(False, "one matrix for embedding and head")
    dropout: float = option(0.0, "probability of dropping a value after attention and SwiGLU", least=0, below=1)
    rope_base: float = option(10000.0, "base of the rotary position embedding", above=1)
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
    )
    lora: str | None = option(
        None,
        "train low-rank adapters alone: rank,alpha,target,... such as 8,16,q_proj,v_proj, or the folder of an adapter "
        "of PEFT to go on with",
    )
    dtype: str = option(
        "float32",
        "type of activations and products; bfloat16 and float16 keep parameters in float32",
        choices=("float32", "float64", "bfloat16", "float16"),
    )
