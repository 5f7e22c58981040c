"""What was expected of measurements before anything of this package had run on a GPU: data, to be proven wrong.

The numbers were computed from the sources, from data sheets and from what others have published: for one H100 SXM with
3.35 TB/s of memory, of which 2.8 are usable, and one H200 with 4.8 TB/s, of which 4.3 are. Both have 989 TFLOP/s in
bfloat16 without sparsity, of which products of these sizes reach 550. They are no measurements, and no goals: goals
stand in `bench gpu`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

GPUS = ("H100", "H200")


class Expectation(NamedTuple):
    """A range that a measurement was expected in.

    Attributes
    ----------
    row : regular expression for what was measured, found at the beginning
    low, high : the range, in the unit of the row
    why : where the range comes from
    peer : what the row is compared with, where the range is of that; else the range is of the row's own value
    ratio : whether the range is of the ratio between both
    gpu : the one of GPUS that it is for; "" is for all of them
    """

    row: str
    low: float
    high: float
    why: str
    peer: str = ""
    ratio: bool = False
    gpu: str = ""


STEP = r"training step, {}, .*1 x 8 x 1024 tokens"
UNTIED, TIED, ANY = (STEP.format(kind) for kind in ("untied", "tied", "(un)?tied"))
EXPECTATIONS = (
    Expectation(
        UNTIED, 415e3, 460e3,
        "18.9 ms a step: products 10.9, attention 2.3, norms, SwiGLU, loss and optimizer 5.2, gaps 0.6", gpu="H100",
    ),
    Expectation(
        UNTIED, 450e3, 500e3,
        "17.3 ms a step: products 10.8, attention 2.2, norms, SwiGLU, loss and optimizer 3.7, gaps 0.6", gpu="H200",
    ),
    Expectation(
        TIED, 0.97, 1.06,
        "no gradient crosses to the host; 38.6 M parameters less for AdamW, cast and zero",
        peer="untied", ratio=True,
    ),
    Expectation(ANY, 280e3, 280e3, "29 ms a step", peer="PyTorch eager, autocast", gpu="H100"),
    Expectation(ANY, 333e3, 333e3, "24.6 ms a step", peer="PyTorch eager, autocast", gpu="H200"),
    Expectation(ANY, 430e3, 430e3, "19 ms a step", peer="PyTorch torch.compile", gpu="H100"),
    Expectation(ANY, 468e3, 468e3, "17.5 ms a step", peer="PyTorch torch.compile", gpu="H200"),
    Expectation(
        r"training step, 16 x 1 x 512 tokens, CUDA graphs", 0.75, 0.9,
        "a launch for each action in place of some 200; products of 512 rows reach less of the peak",
        peer="1 x 8 x 1024 tokens", ratio=True,
    ),
    Expectation(
        r"training step, 16 x 1 x 512 tokens$", 0.45, 0.55,
        "24 calls a layer of about 8 us: bound by launches below 1500 tokens",
        peer="1 x 8 x 1024 tokens", ratio=True,
    ),
    Expectation(r"copy on the device", 2600, 3350, "memory: 3.35 TB/s by its data sheet, 2.8 usable", gpu="H100"),
    Expectation(r"copy on the device", 4000, 4800, "memory: 4.8 TB/s by its data sheet, 4.3 usable", gpu="H200"),
    Expectation(r"staged, 16777216 B$", 5.0, 8.4, "12.6 MB through pinned memory in 1.5 to 2.5 ms"),
    Expectation(r"(direct|nccl), 16777216 B$", 100, 400, "12.6 MB between two GPUs of a node in 0.05 ms"),
)  # fmt: skip


def beside(row: Mapping[str, Any], gpus: Iterable[str]) -> dict[str, str]:
    """Return what was expected of a row, and "kept", "beaten" or "missed"; empty texts where nothing was.

    Parameters
    ----------
    row : a measurement, as in the JSON of `bench gpu`
    gpus : descriptions of the GPUs; nothing was expected of others than GPUS, nor of several kinds at once
    """
    kinds = {next((kind for kind in GPUS if re.search(rf"\b{kind}\b", gpu)), "") for gpu in gpus}
    kind = kinds.pop() if len(kinds) == 1 else ""
    found = next((each for each in EXPECTATIONS if each.gpu in ("", kind) and _concerns(each, row)), None)
    if found is None or not kind:
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
