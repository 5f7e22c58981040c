"""python -m mpipipe.gpu_check, from the root of a checkout; jobs/gpu_check.sh sets its environment."""

from __future__ import annotations

import os
import sys

from mpipipe.gpu_check.check import Clock
from mpipipe.gpu_check.suite import CannotStartError, Settings, Suite


def main() -> int:
    """Run all checks. Returns 0 where no correctness check failed, 1 where one did, 2 where none could begin."""
    try:
        settings = Settings.from_environment(os.environ)
        clock = Clock(settings.limits.everything)
        settings.interpreter.require_gpu()
        settings.make_folder()
    except CannotStartError as error:
        sys.stderr.write(f"gpu_check: {error}\n")
        return 2
    return Suite(settings, clock).run()


if __name__ == "__main__":
    sys.exit(main())
