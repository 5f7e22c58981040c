"""Text from a model, and how text of unknown content is shown."""

from __future__ import annotations

from collections.abc import Sequence

from mpipipe.comm.group import group_of
from mpipipe.train.decoder import Decoder
from mpipipe.train.generation import answers, check_prompts
from mpipipe.train.sampling import Sampling


def generate(decoder: Decoder, prompt: bytes, count: int, *, temperature: float, seed: int) -> bytes:
    """Return bytes that continue `prompt`, the same on every rank. Collective over the mesh of the decoder.

    Parameters
    ----------
    decoder : what `build_decoder` makes, before any other forward
    prompt : at least one byte, on every rank
    count : number of bytes to return
    temperature : divides the logits; 0 takes the likeliest byte
    seed : of the draws

    Raises, on every rank, ArgumentError for an empty prompt and a temperature that is below 0 or not finite, and
    NonFiniteError if the model gives logits that are NaN or infinite.
    """
    return bytes(continued(decoder, prompt, count, 256, temperature=temperature, seed=seed))


def continued(
    decoder: Decoder, prompt: Sequence[int], count: int, vocab: int, *, temperature: float, seed: int
) -> list[int]:
    """Return token ids that continue those of `prompt`, as `generate` does for bytes; `vocab` is that of the model."""
    with group_of(decoder.mesh.comm).together("generate: the prompt"):
        sampling = Sampling(temperature=temperature, seed=seed)
        check_prompts([prompt], count, vocab)
    return [drawn.token for drawn in answers(decoder, [prompt], count, sampling)]


def readable(text: bytes) -> str:
    """Decode UTF-8, with a replacement character for all that would not show, or would move a cursor."""
    return shown(text.decode(errors="replace"))


def shown(text: str) -> str:
    """Put a replacement character for all that would not show, or would move a cursor."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
