"""What the description of a GPT may say: its fields one by one, and those that do not go together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpipipe.errors import ArgumentError
from mpipipe.nn.rope_scaling import KINDS, RopeScaling, scaling_of
from mpipipe.wording import counted

SIZES = ("vocab", "dim", "layers", "heads", "kv_heads", "hidden", "seq", "head_dim")
CHOICES = {"norm": ("rms", "layer"), "positions": ("rotary", "learned"), "feed_forward": ("swiglu", "gelu")}
NEAR = 1000  # numbers of heads that are tried for a remedy
SWITCHES = ("qkv_bias", "out_bias", "qk_norm", "feed_forward_bias")


def check_sizes(values: dict[str, Any]) -> None:
    """Raise ArgumentError unless each of these fields, by name, has a value that means something by itself."""
    for name in SIZES:
        if name in values and not _is_size(values[name]):
            raise _wrong(name, values[name], "an integer of at least 1")
    for name, choices in CHOICES.items():
        if values[name] not in choices:
            raise _wrong(name, values[name], " or ".join(map(repr, choices)))
    for name in SWITCHES:
        if type(values[name]) is not bool:
            raise _wrong(name, values[name], "True or False")
    if not _is_number(values["eps"]) or values["eps"] < 0:
        raise _wrong("eps", values["eps"], "a finite number of at least 0")
    if not _is_number(values["embedding_scale"]) or values["embedding_scale"] == 0:
        raise _wrong("embedding_scale", values["embedding_scale"], "a finite number other than 0")


def check_heads(values: dict[str, Any]) -> None:
    """Raise ArgumentError unless the heads go together; `head_dim` is None if it is to follow from the width."""
    dim, heads, head_dim = values["dim"], values["heads"], values["head_dim"]
    rotary = values["positions"] == "rotary"
    if head_dim is None and dim % (2 * heads if rotary else heads):
        step = 2 * heads if rotary else heads
        raise ArgumentError(
            "the heads do not divide the width of a GPT evenly",
            found=f"dim {dim}, heads {heads}",
            expected="dim a multiple of 2 x heads, since rotary positions turn pairs of elements"
            if rotary
            else "dim a multiple of heads",
            remedy=f"for example dim = {-(-dim // step) * step}{_or_heads(dim, heads, 2 if rotary else 1)}",
        )
    if head_dim is not None and rotary and head_dim % 2:
        raise ArgumentError(
            "head_dim of a GPT is odd", found=f"head_dim {head_dim}", expected="pairs of elements, for rotary positions"
        )
    if heads % values["kv_heads"]:
        raise ArgumentError(
            "kv_heads of a GPT is no divisor of heads", found=f"kv_heads {values['kv_heads']}, heads {heads}"
        )


def _or_heads(dim: int, heads: int, unit: int) -> str:
    """Return the number of heads below `heads` that fits, as a remedy; nothing where there is none."""
    near = range(heads - 1, max(0, heads - NEAR), -1)
    found = next((number for number in near if dim % (unit * number) == 0), None)
    return "" if found is None else f", or heads = {found}"


def check_positions(values: dict[str, Any]) -> None:
    """Raise ArgumentError for options of rotary positions beside learned ones, or the other way round."""
    most, learned = values["max_positions"], values["positions"] == "learned"
    if learned and values["rope_scaling"] is not None:
        raise ArgumentError(
            "a GPT with learned positions has no rope_scaling",
            found=repr(values["rope_scaling"]),
            expected="None",
            remedy="say positions='rotary', or leave rope_scaling out",
        )
    if not learned and most is not None:
        raise ArgumentError(
            "a GPT with rotary positions has no table of max_positions rows",
            found=f"max_positions {most}",
            expected="None",
            remedy="say positions='learned', or leave max_positions out",
        )
    if learned and most is not None and (not _is_size(most) or most < values["seq"]):
        raise _wrong("max_positions", most, f"an integer of at least seq, {values['seq']}")


def checked_scaling(scaling: Any, base: Any) -> RopeScaling | None:
    """Return the scaling, made from a mapping where it is one."""
    if not _is_number(base) or base <= 1:
        raise _wrong("rope_base", base, "a finite number above 1")
    if isinstance(scaling, Mapping):
        return scaling_of(scaling)
    if scaling is not None and type(scaling) not in KINDS.values():
        expected = " or ".join(kind.__name__ for kind in KINDS.values())
        raise _wrong("rope_scaling", scaling, f"None or {expected} of mpipipe.nn")
    return scaling


def checked_windows(windows: Any, layers: int) -> tuple[int | None, ...] | None:
    """Return a window for each layer, or None if no layer has one."""
    if windows is None:
        return None
    if type(windows) not in (tuple, list) or len(windows) != layers:
        raise _wrong("windows", windows, f"a tuple of {counted(layers, 'window')}, one for each layer")
    for window in windows:
        if window is not None and not _is_size(window):
            raise _wrong("windows", windows, "for each layer an integer of at least 1, or None")
    return None if all(window is None for window in windows) else tuple(windows)


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # the types are looked at


def _wrong(name: str, value: object, expected: str) -> ArgumentError:
    return ArgumentError(f"{name} of a GPT", found=f"{value!r:.200}", expected=expected)
