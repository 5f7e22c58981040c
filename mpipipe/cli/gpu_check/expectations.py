"""What was expected of measurements before anything of this package had run on a GPU: data, to be proven wrong.

The numbers were computed from the sources and from data sheets, for one H100 SXM: 989 TFLOP/s in bfloat16 without
sparsity, of which large products reach 550, and 3.35 TB/s, of which 2.8 are usable. They are no measurements, and no
goals: goals stand in `bench gpu`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

GPU = "H100"


class Expectation(NamedTuple):
    """A range that a measurement was expected in.

    Attributes
    ----------
    row : regular expression for what was measured, found at the beginning
    low, high : the range, in the unit of the row
    why : where the range comes from
    peer : what the row is compared with, where the range is of that; else the range is of the row's own value
    ratio : whether the range is of the ratio between both
    """

    row: str
    low: float
    high: float
    why: str
    peer: str = ""
    ratio: bool = False


STEP = r"training step, {}, .*1 x 8 x 1024 tokens"
UNTIED, TIED, ANY = (STEP.format(kind) for kind in ("untied", "tied", "(un)?tied"))
EXPECTATIONS = (
    Expectation(
        UNTIED, 415e3, 460e3,
        "20 to 17.8 ms a step: products 10.9, attention 2.0, norms and SwiGLU 3.1, loss 0.6, optimizer 1.9, gaps 1.2",
    ),
    Expectation(
        TIED, 0.97, 1.06,
        "no gradient crosses to the host; 38.6 M parameters less for AdamW, cast and zero",
        peer="untied", ratio=True,
    ),
    Expectation(ANY, 280e3, 280e3, "29 ms a step", peer="PyTorch eager, autocast"),
    Expectation(ANY, 430e3, 430e3, "19 ms a step", peer="PyTorch torch.compile"),
    Expectation(
        r"training step, 16 x 1 x 512 tokens, CUDA graphs", 0.7, 1.0,
        "a launch for each action in place of some 200; products of 512 rows reach less of the peak",
        peer="1 x 8 x 1024 tokens", ratio=True,
    ),
    Expectation(
        r"training step, 16 x 1 x 512 tokens$", 0.34, 0.8,
        "392 launches of 9.5 us a micro-batch: bound by launches below 1500 tokens",
        peer="1 x 8 x 1024 tokens", ratio=True,
    ),
    Expectation(r"copy on the device", 2600, 3350, "memory: 3.35 TB/s by its data sheet, 2.8 usable"),
    Expectation(r"staged, 16777216 B$", 5.0, 8.4, "12.6 MB through pinned memory in 1.5 to 2.5 ms"),
    Expectation(r"(direct|nccl), 16777216 B$", 100, 400, "12.6 MB between two GPUs of a node in 0.05 ms"),
)  # fmt: skip


def beside(row: Mapping[str, Any], gpus: Iterable[str]) -> dict[str, str]:
    """Return what was expected of a row, and "kept", "beaten" or "missed"; empty texts where nothing was.

    Parameters
    ----------
    row : a measurement, as in the JSON of `bench gpu`
    gpus : descriptions of the GPUs; nothing was expected of others than GPU
    """
    found = next((each for each in EXPECTATIONS if _concerns(each, row)), None)
    if found is None or not any(GPU in gpu for gpu in gpus):
        return {"expected": "", "verdict": ""}
    value = row["ratio"] if found.ratio else row["peer_value"] if found.peer else row["value"]
    span = f"{found.low:.4g}" if found.low == found.high else f"{found.low:.4g} to {found.high:.4g}"
    what = "ratio " if found.ratio else f"{row['peer']} " if found.peer else ""
    return {"expected": f"{what}{span} ({found.why})", "verdict": _verdict(value, found)}


def _concerns(each: Expectation, row: Mapping[str, Any]) -> bool:
    if not re.match(each.row, row["what"]):
        return False
    return row["peer"].startswith(each.peer) if each.peer else not row["peer"].startswith("PyTorch")


def _verdict(value: float, found: Expectation) -> str:
    """Name where the value lies; a range of one number holds what rounds to its two digits."""
    slack = 0.05 * found.low if found.low == found.high else 0.0
    if value < found.low - slack:
        return "missed"
    return "beaten" if value > found.high + slack else "kept"
