"""`bench gpu`: what kernels, a ring, a training step, the executor and transports reach on this
GPU.
"""
