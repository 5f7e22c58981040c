"""Functions and losses of JAX."""
