"""Models made of layers, to be cut into stages."""

from mpipipe.models.gpt import GPT

__all__ = ["GPT"]
