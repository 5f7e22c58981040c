"""`bench gpu`: what the kernels, the ring, a training step, the executor and the transports reach on this GPU.

Each part is a module with `measure(...)`, whose defaults are the sizes that are reported, and which yields rows.
"""
