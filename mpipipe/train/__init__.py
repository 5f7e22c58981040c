"""Training a model on text: configuration, data, the loop, and what it reports."""

from mpipipe.train.config import TrainConfig
from mpipipe.train.report import Record
from mpipipe.train.setup import train

__all__ = ["Record", "TrainConfig", "train"]
