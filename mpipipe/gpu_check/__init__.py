"""Checks and measures mpipipe on the GPU of this machine; jobs/gpu_check.sh starts it, and says how to use it."""
