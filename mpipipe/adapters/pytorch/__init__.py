"""Modules and losses of PyTorch."""
