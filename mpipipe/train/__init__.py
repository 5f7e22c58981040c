"""Training a model: configuration, the loop, and what it reports."""

from mpipipe.train.config import TrainConfig
from mpipipe.train.report import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpipipe.train.setup import train

__all__ = ["Record", "TrainConfig", "train"]


def __getattr__(name: str) -> object:
    """Import `train` when it is first used: what it trains imports the configuration."""
    if name == "train":
        from mpipipe.train.setup import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
