"""`bench gpu`: what kernels, a ring, a training step and transports reach on this GPU."""
