"""On PYTHONPATH this makes `import cupy` the emulated device, for jobs that a test starts.

MPIPIPE_TEST_GPU_SEED, _DEVICES, _MEMORY (bytes) and _FAULTS (of machine.FAULTS, separated by commas) say what it is.
"""

import atexit
import os
import sys

from support import emulator


def setting(name, default=""):
    return os.environ.get(f"MPIPIPE_TEST_GPU_{name}", default)


emulator.install(
    int(setting("SEED", "0")),
    int(setting("DEVICES", "1")),
    faults=filter(None, setting("FAULTS").split(",")),
    memory=int(setting("MEMORY", str(1 << 34))),
)


@atexit.register
def report():
    errors = emulator.uninstall()
    if errors:
        print("on the emulated device: " + "; ".join(errors), file=sys.stderr, flush=True)
        os._exit(70)
