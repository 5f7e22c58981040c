"""Rotary positions in config.json: the base and the scaling, in the old form and the new one.

    old    "rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}      (or "type")
    new    "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}   (transformers 5)

Both are read. The old one is written: transformers 5 reads it, and earlier versions know no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mpipipe import nn
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.models.huggingface.options import Options

SCALING, PARAMETERS, THETA = "rope_scaling", "rope_parameters", "rope_theta"
BASE = 10000.0  # where no option says another one, in all families


@dataclass(frozen=True)
class Rotary:
    """What a config.json says of rotary positions."""

    base: float
    scaling: Any


def read_rotary(options: Options, positions: int) -> Rotary:
    """Read base and scaling; `positions` is max_position_embeddings. Raises ConfigError."""
    options.only("partial_rotary_factor", None, 1.0, 1)
    options.only("rope_interleaved", False, None)
    base = options.number(THETA, None, above=1.0)
    old, new = _object(options, SCALING), _object(options, PARAMETERS)
    if old is not None and new is not None and old != new:
        raise options.error(SCALING, f"that, or {PARAMETERS}, or the same in both", "contradicts another one")
    key = SCALING if old is not None else PARAMETERS
    values = {} if old is None and new is None else options.values[key]
    inner = Options(values, options.path, key)
    inside = inner.number(THETA, None, above=1.0)
    if base is not None and inside not in (None, base):
        raise inner.error(THETA, f"{base}, the rope_theta beside it", "contradicts another one")
    inner.only("partial_rotary_factor", None, 1.0, 1)
    scaling = _scaling(inner, positions)
    return Rotary(base or inside or BASE, scaling)


def _object(options: Options, key: str) -> dict[str, Any] | None:
    """Return an object that is not empty; None where it is, or is null or missing."""
    found = options.take(key)
    if not isinstance(found, (dict, type(None))):
        raise options.error(key, "an object, or null")
    return found or None


def _scaling(options: Options, positions: int) -> Any:
    kinds = [options.take(name) for name in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    if not isinstance(kind, str) or kind not in READERS:
        name = "rope_type" if kinds[0] else "type"
        raise options.error(name, " or ".join(READERS), "has a value that is not supported")
    try:
        scaling = READERS[kind](options, positions)
    except ConfigError:
        raise
    except ArgumentError as error:  # of the scaling itself
        raise ConfigError(
            f"{options.inside} of a model folder: {error.message}",
            found=f"{error.found} in {options.path}",
            expected=error.expected,
        ) from error
    options.finish(f"rotary positions of the kind {kind}")
    return scaling


def _default(options: Options, positions: int) -> None:
    return None


def _linear(options: Options, positions: int) -> Any:
    return nn.LinearScaling(options.number("factor"))


def _llama3(options: Options, positions: int) -> Any:
    return nn.Llama3Scaling(
        options.number("factor"),
        low_freq_factor=options.number("low_freq_factor"),
        high_freq_factor=options.number("high_freq_factor"),
        original_positions=options.count("original_max_position_embeddings", positions),
    )


def _yarn(options: Options, positions: int) -> Any:
    options.only("truncate", True, None)
    factor = options.number("factor")
    attention = options.number("attention_factor", None)
    one, all_dim = options.number("mscale", None), options.number("mscale_all_dim", None)
    if attention is None and one is not None and all_dim is not None:
        attention = _growth(factor, one) / _growth(factor, all_dim)
    return nn.YarnScaling(
        factor,
        original_positions=options.count("original_max_position_embeddings", positions),
        beta_fast=options.number("beta_fast", 32.0),
        beta_slow=options.number("beta_slow", 1.0),
        attention_factor=attention,
    )


def _growth(factor: float, scale: float) -> float:
    """Growth of cosine and sine: Peng et al., "YaRN" (2023), section 3.4, with a scale as in the library."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


READERS: dict[str, Callable[[Options, int], Any]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def rotary_options(base: float, scaling: Any) -> dict[str, Any]:
    """Return the options of config.json for a base and a scaling."""
    return {THETA: base, SCALING: None if scaling is None else _written(scaling)}


def _written(scaling: Any) -> dict[str, Any]:
    names = {"original_positions": "original_max_position_embeddings", "kind": "rope_type"}
    return {names.get(name, name): value for name, value in asdict(scaling).items() if value is not None}
