"""Whether two trainings that should be the same have the same losses.

python jobs/compare_losses.py TITLE FOLDER OTHER_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mpipipe import files
from mpipipe.train.report import METRICS, MOST_BYTES

LARGEST = 1e-4  # relative difference: rounding, after a few steps


def losses(run: Path) -> list[float]:
    """Return the losses in the metrics.jsonl of an output folder, of training and of validation, in
    order.
    """
    records = [json.loads(line) for line in files.read_text(run / METRICS, MOST_BYTES).splitlines()]
    return [record[key] for record in records for key in ("loss", "validation") if key in record]


def main(title: str, one: str, other: str) -> int:
    """Print the verdict and the largest relative difference; return 0 where the losses are the
    same, else 1.
    """
    first = losses(Path(one))
    second = losses(Path(other))
    differences = [abs(a - b) / b for a, b in zip(first, second)]
    same = len(first) == len(second) > 0 and all(difference < LARGEST for difference in differences)
    sys.stdout.write(
        f"mpipipe: {title} {'ok' if same else 'failed'} losses={len(differences)} "
        f"largest relative difference={max(differences, default=float('nan')):.1e}\n"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
