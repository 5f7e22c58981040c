"""`bash jobs/gpu_check.sh`: whether the package is right, and how fast, on a machine with a GPU.

suite               the parts in their order, and the interpreter that runs them
check               one part with its limit; the report
extra               parts that ask the real libraries: cuDNN; graphs, NCCL, a full GPU
"""
