"""On PYTHONPATH this makes `import cupy` the emulated device, for jobs that a test starts."""

import atexit
import os
import sys

from support import emulator

emulator.install(int(os.environ.get("MPIPIPE_TEST_GPU_SEED", "0")), amd=os.environ.get("MPIPIPE_TEST_GPU") == "amd")


@atexit.register
def report():
    errors = emulator.uninstall()
    if errors:
        print("on the emulated device: " + "; ".join(errors), file=sys.stderr, flush=True)
        os._exit(70)
