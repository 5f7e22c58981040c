"""Where an answer ends, as the files beside a model say it; the same for a folder of Hugging Face and for weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpipipe.models.huggingface.options import read_json

GENERATION = "generation_config.json"


def ends_in(folder: Path, config: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """Return the ids of `eos_token_id`, one or several, of those below `vocab`; none if nobody says it.

    generation_config.json in the folder says it, or else `config`, the model's own description.

    Raises ConfigError if that file cannot be read.
    """
    path = folder / GENERATION
    facts = read_json(path, "copy the folder again, or leave that file out") if path.exists() else config
    found = facts.get("eos_token_id")
    several = found if isinstance(found, list) else [found]
    return tuple(each for each in several if type(each) is int and 0 <= each < vocab)
