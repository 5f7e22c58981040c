"""On PYTHONPATH this makes `import cupy` the emulated device, for jobs that a test starts."""

import atexit
import os
import sys

from support import emulator

machine = emulator.install(int(os.environ.get("MPIPIPE_TEST_GPU_SEED", "0")))
if os.environ.get("MPIPIPE_TEST_GPU_OWN"):  # a GPU for each rank
    machine.first_bus = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)


@atexit.register
def report():
    errors = emulator.uninstall()
    if errors:
        print("on the emulated device: " + "; ".join(errors), file=sys.stderr, flush=True)
        os._exit(70)
