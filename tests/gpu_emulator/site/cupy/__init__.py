"""On PYTHONPATH this makes `import cupy` the emulated device, for jobs that a test starts.

Variables say what it is: seed, number of GPUs, bytes of each, and what the machine lacks (of machine.FAULTS, separated
by commas).
"""

import atexit
import os
import sys

import gpu_emulator as emulator

machine = emulator.install(
    int(os.environ.get("MPIPIPE_TEST_GPU_SEED", "0")),
    int(os.environ.get("MPIPIPE_TEST_GPU_DEVICES", "1")),
    faults=filter(None, os.environ.get("MPIPIPE_TEST_GPU_FAULTS", "").split(",")),
    memory=int(os.environ.get("MPIPIPE_TEST_GPU_MEMORY", str(1 << 34))),
    amd=os.environ.get("MPIPIPE_TEST_GPU") == "amd",
)
if os.environ.get("MPIPIPE_TEST_GPU_OWN"):  # a GPU for each rank
    machine.first_bus = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)


@atexit.register
def report():
    errors = emulator.uninstall()
    if errors:
        print("on the emulated device: " + "; ".join(errors), file=sys.stderr, flush=True)
        os._exit(70)
