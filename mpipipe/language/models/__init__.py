"""Models made of layers, to be cut into stages."""

from mpipipe.language.models.gpt import GPT

__all__ = ["GPT"]
